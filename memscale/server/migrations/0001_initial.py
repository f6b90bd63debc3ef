"""The tables of the first version."""

import django.db.models.deletion
import memscale.server.models
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='User',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('password', models.CharField(max_length=128, verbose_name='password')),
                ('last_login', models.DateTimeField(blank=True, null=True, verbose_name='last login')),
                ('email', models.EmailField(max_length=254, unique=True)),
                ('is_active', models.BooleanField(default=True)),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='Run',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uid', models.CharField(max_length=16)),
                ('name', models.CharField(max_length=200)),
                ('card', models.CharField(max_length=80)),
                ('model', models.CharField(blank=True, max_length=64)),
                ('commit', models.CharField(blank=True, max_length=64)),
                ('made', models.DateTimeField()),
                ('received', models.DateTimeField(auto_now_add=True)),
                ('budget_bytes', models.BigIntegerField(null=True)),
                ('usable_bytes', models.BigIntegerField()),
                ('taken_bytes', models.BigIntegerField()),
                ('peak_bytes', models.BigIntegerField()),
                ('measured_bytes', models.BigIntegerField(null=True)),
                ('step_seconds', models.FloatField(null=True)),
                ('sent_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name='Plan',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('hash', models.CharField(max_length=64)),
                ('document', models.TextField()),
                ('made', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name='Project',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('slug', models.SlugField(max_length=40)),
                ('name', models.CharField(max_length=80)),
                ('made', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name='Team',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('slug', models.SlugField(max_length=40, unique=True)),
                ('name', models.CharField(max_length=80)),
                ('made', models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name='Document',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='document', serialize=False, to='server.run')),
                ('text', models.TextField()),
            ],
        ),
        migrations.AddField(
            model_name='run',
            name='plan',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='runs', to='server.plan'),
        ),
        migrations.AddField(
            model_name='run',
            name='project',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='server.project'),
        ),
        migrations.CreateModel(
            name='Baseline',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('label', models.CharField(max_length=80)),
                ('name', models.CharField(max_length=200)),
                ('card', models.CharField(max_length=80)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='baselines', to='server.run')),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='baselines', to='server.project')),
            ],
        ),
        migrations.AddField(
            model_name='project',
            name='team',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='projects', to='server.team'),
        ),
        migrations.AddField(
            model_name='plan',
            name='team',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='plans', to='server.team'),
        ),
        migrations.CreateModel(
            name='Membership',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('role', models.PositiveSmallIntegerField(choices=[(10, 'viewer'), (20, 'member'), (30, 'maintainer'), (40, 'owner')])),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='memberships', to=settings.AUTH_USER_MODEL)),
                ('team', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='memberships', to='server.team')),
            ],
        ),
        migrations.CreateModel(
            name='Invitation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('hash', models.CharField(max_length=64, unique=True)),
                ('email', models.EmailField(blank=True, max_length=254)),
                ('role', models.PositiveSmallIntegerField(choices=[(10, 'viewer'), (20, 'member'), (30, 'maintainer'), (40, 'owner')], default=memscale.server.models.Role['owner'])),
                ('expires', models.DateTimeField()),
                ('invited_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL)),
                ('team', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='server.team')),
            ],
        ),
        migrations.CreateModel(
            name='Audit',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('when', models.DateTimeField(auto_now_add=True)),
                ('what', models.CharField(max_length=40)),
                ('about', models.CharField(max_length=300)),
                ('user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
                ('team', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='audits', to='server.team')),
            ],
        ),
        migrations.CreateModel(
            name='Token',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=80)),
                ('hash', models.CharField(max_length=64, unique=True)),
                ('scope', models.CharField(choices=[('read', 'read'), ('write', 'read and write')], max_length=8)),
                ('made', models.DateTimeField(auto_now_add=True)),
                ('expires', models.DateTimeField()),
                ('revoked', models.DateTimeField(null=True)),
                ('team', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='tokens', to='server.team')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='tokens', to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name='Measurement',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=80)),
                ('value', models.FloatField()),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='measurements', to='server.run')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('run', 'name'), name='one_measurement')],
            },
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['project', '-made', '-id'], name='newest'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['project', '-taken_bytes', '-id'], name='largest'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['project', 'name', 'card', '-made', '-id'], name='of_a_name'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['project', 'card', '-made', '-id'], name='of_a_card'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['project', 'commit', '-made', '-id'], name='of_a_commit'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['project', 'model', '-made', '-id'], name='of_a_model'),
        ),
        migrations.AddConstraint(
            model_name='run',
            constraint=models.UniqueConstraint(fields=('project', 'uid'), name='one_run'),
        ),
        migrations.AddConstraint(
            model_name='baseline',
            constraint=models.UniqueConstraint(fields=('project', 'label', 'name', 'card'), name='one_baseline'),
        ),
        migrations.AddConstraint(
            model_name='project',
            constraint=models.UniqueConstraint(fields=('team', 'slug'), name='one_project'),
        ),
        migrations.AddConstraint(
            model_name='plan',
            constraint=models.UniqueConstraint(fields=('team', 'hash'), name='one_plan'),
        ),
        migrations.AddConstraint(
            model_name='membership',
            constraint=models.UniqueConstraint(fields=('team', 'user'), name='one_role'),
        ),
        migrations.AddIndex(
            model_name='audit',
            index=models.Index(fields=['team', '-id'], name='newest_audits'),
        ),
    ]
