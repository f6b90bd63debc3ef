"""The tables of the first version, each whole."""

import django.db.models.deletion
import memscale.server.models
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = []

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
            name='Project',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('team', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='projects', to='server.team')),
                ('slug', models.SlugField(max_length=40)),
                ('name', models.CharField(max_length=80)),
                ('made', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('team', 'slug'), name='one_project')],
            },
        ),
        migrations.CreateModel(
            name='Plan',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('team', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='plans', to='server.team')),
                ('hash', models.CharField(max_length=64)),
                ('document', models.TextField()),
                ('made', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('team', 'hash'), name='one_plan')],
            },
        ),
        migrations.CreateModel(
            name='Run',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='server.project')),
                ('uid', models.CharField(max_length=16)),
                ('name', models.CharField(max_length=200)),
                ('card', models.CharField(max_length=80)),
                ('model', models.CharField(blank=True, max_length=64)),
                ('commit', models.CharField(blank=True, max_length=64)),
                ('made', models.DateTimeField()),
                ('received', models.DateTimeField(auto_now_add=True)),
                ('sent_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
                ('plan', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='runs', to='server.plan')),
                ('budget_bytes', models.BigIntegerField(null=True)),
                ('usable_bytes', models.BigIntegerField()),
                ('taken_bytes', models.BigIntegerField()),
                ('peak_bytes', models.BigIntegerField()),
                ('measured_bytes', models.BigIntegerField(null=True)),
                ('step_seconds', models.FloatField(null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['project', '-made', '-id'], name='newest'),
                    models.Index(fields=['project', '-taken_bytes', '-id'], name='largest'),
                    models.Index(fields=['project', 'name', 'card', '-made', '-id'], name='of_a_name'),
                    models.Index(fields=['project', 'card', '-made', '-id'], name='of_a_card'),
                    models.Index(fields=['project', 'commit', '-made', '-id'], name='of_a_commit'),
                    models.Index(fields=['project', 'model', '-made', '-id'], name='of_a_model'),
                ],
                'constraints': [models.UniqueConstraint(fields=('project', 'uid'), name='one_run')],
            },
        ),
        migrations.CreateModel(
            name='Document',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='document', serialize=False, to='server.run')),
                ('text', models.TextField()),
            ],
        ),
        migrations.CreateModel(
            name='Measurement',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='measurements', to='server.run')),
                ('name', models.CharField(max_length=80)),
                ('value', models.FloatField()),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('run', 'name'), name='one_measurement')],
            },
        ),
        migrations.CreateModel(
            name='Baseline',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='baselines', to='server.project')),
                ('label', models.CharField(max_length=80)),
                ('name', models.CharField(max_length=200)),
                ('card', models.CharField(max_length=80)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='baselines', to='server.run')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('project', 'label', 'name', 'card'), name='one_baseline')],
            },
        ),
        migrations.CreateModel(
            name='Membership',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('team', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='memberships', to='server.team')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='memberships', to=settings.AUTH_USER_MODEL)),
                ('role', models.PositiveSmallIntegerField(choices=[(10, 'viewer'), (20, 'member'), (30, 'maintainer'), (40, 'owner')])),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('team', 'user'), name='one_role')],
            },
        ),
        migrations.CreateModel(
            name='Token',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('team', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='tokens', to='server.team')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='tokens', to=settings.AUTH_USER_MODEL)),
                ('name', models.CharField(max_length=80)),
                ('hash', models.CharField(max_length=64, unique=True)),
                ('scope', models.CharField(choices=[('read', 'read'), ('write', 'read and write')], max_length=8)),
                ('made', models.DateTimeField(auto_now_add=True)),
                ('expires', models.DateTimeField()),
                ('revoked', models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name='Invitation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('hash', models.CharField(max_length=64, unique=True)),
                ('team', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to='server.team')),
                ('email', models.EmailField(blank=True, max_length=254)),
                ('role', models.PositiveSmallIntegerField(choices=[(10, 'viewer'), (20, 'member'), (30, 'maintainer'), (40, 'owner')], default=memscale.server.models.Role['owner'])),
                ('expires', models.DateTimeField()),
                ('invited_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name='Audit',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('team', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='audits', to='server.team')),
                ('user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
                ('when', models.DateTimeField(auto_now_add=True)),
                ('what', models.CharField(max_length=40)),
                ('about', models.CharField(max_length=300)),
            ],
            options={
                'indexes': [models.Index(fields=['team', '-id'], name='newest_audits')],
            },
        ),
    ]
