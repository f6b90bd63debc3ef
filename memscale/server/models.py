"""The tables of the server. Texts from clients are stored as they came, and escaped where they are shown."""

from __future__ import annotations

import enum

from django.contrib.auth.models import AbstractBaseUser, BaseUserManager
from django.db import models


class Role(enum.IntEnum):
    """The rights of a member; each role includes the lower ones."""

    viewer = 10
    member = 20
    maintainer = 30
    owner = 40


ROLES = [(role.value, role.name) for role in Role]


class Users(BaseUserManager):
    """Creates accounts, which are identified by an e-mail address."""

    def create_user(self, email: str, password: str) -> User:
        """Creates and saves an account, with the password's hash."""
        user: User = self.model(email=self.normalize_email(email).lower())
        user.set_password(password)
        user.save()
        return user


class User(AbstractBaseUser):
    """A person, or a program with a person's account. Roles belong to teams: there is no superuser."""

    email = models.EmailField(unique=True)
    is_active = models.BooleanField(default=True)
    USERNAME_FIELD = "email"
    REQUIRED_FIELDS = ()
    objects = Users()


class Team(models.Model):
    """People who see each other's runs; teams share nothing."""

    slug = models.SlugField(max_length=40, unique=True)
    name = models.CharField(max_length=80)
    made = models.DateTimeField(auto_now_add=True)


class Membership(models.Model):
    """A user's role in a team."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, models.CASCADE, related_name="memberships")
    role = models.PositiveSmallIntegerField(choices=ROLES)

    class Meta:
        """One role per user and team."""

        constraints = (models.UniqueConstraint(fields=("team", "user"), name="one_role"),)


class Project(models.Model):
    """Runs that are compared with each other."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="projects")
    slug = models.SlugField(max_length=40)
    name = models.CharField(max_length=80)
    made = models.DateTimeField(auto_now_add=True)

    class Meta:
        """One project per slug and team."""

        constraints = (models.UniqueConstraint(fields=("team", "slug"), name="one_project"),)


class Plan(models.Model):
    """A plan, identified by the hash of its rules, which the server has checked; never changed."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="plans")
    hash = models.CharField(max_length=64)
    document = models.TextField()
    made = models.DateTimeField(auto_now_add=True)

    class Meta:
        """One row per plan and team."""

        constraints = (models.UniqueConstraint(fields=("team", "hash"), name="one_plan"),)


class Run(models.Model):
    """The columns by which runs are listed, filtered and sorted. Documents have their own table, to keep lists fast.

    A run with a plan and a measured peak is also the evidence that the plan works for its model, card and budget.
    """

    project = models.ForeignKey(Project, models.CASCADE, related_name="runs")
    uid = models.CharField(max_length=16)
    name = models.CharField(max_length=200)
    card = models.CharField(max_length=80)
    model = models.CharField(max_length=64, blank=True)
    commit = models.CharField(max_length=64, blank=True)
    made = models.DateTimeField()
    received = models.DateTimeField(auto_now_add=True)
    sent_by = models.ForeignKey(User, models.SET_NULL, null=True)
    plan = models.ForeignKey(Plan, models.SET_NULL, null=True, related_name="runs")
    budget_bytes = models.BigIntegerField(null=True)
    usable_bytes = models.BigIntegerField()
    taken_bytes = models.BigIntegerField()
    peak_bytes = models.BigIntegerField()
    measured_bytes = models.BigIntegerField(null=True)
    step_seconds = models.FloatField(null=True)

    class Meta:
        """One index per order of the list, with and without each filter."""

        constraints = (models.UniqueConstraint(fields=("project", "uid"), name="one_run"),)
        indexes = (
            models.Index(fields=("project", "-made", "-id"), name="newest"),
            models.Index(fields=("project", "-taken_bytes", "-id"), name="largest"),
            models.Index(fields=("project", "name", "card", "-made", "-id"), name="of_a_name"),
            models.Index(fields=("project", "card", "-made", "-id"), name="of_a_card"),
            models.Index(fields=("project", "commit", "-made", "-id"), name="of_a_commit"),
            models.Index(fields=("project", "model", "-made", "-id"), name="of_a_model"),
        )

    @property
    def fits(self) -> bool:
        """Whether the card has the predicted and the measured bytes of the step."""
        return max(self.taken_bytes, self.measured_bytes or 0) <= self.usable_bytes


class Document(models.Model):
    """A run as the client sent it: JSON of the closed schema, without measurements."""

    run = models.OneToOneField(Run, models.CASCADE, primary_key=True, related_name="document")
    text = models.TextField()


class Measurement(models.Model):
    """One measured figure of a run."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="measurements")
    name = models.CharField(max_length=80)
    value = models.FloatField()

    class Meta:
        """One value per run and name."""

        constraints = (models.UniqueConstraint(fields=("run", "name"), name="one_measurement"),)


class Baseline(models.Model):
    """The run against which later runs of its name and card are compared, under a label such as ``main``."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="baselines")
    label = models.CharField(max_length=80)
    name = models.CharField(max_length=200)
    card = models.CharField(max_length=80)
    run = models.ForeignKey(Run, models.CASCADE, related_name="baselines")

    class Meta:
        """One run per project, label, name and card."""

        constraints = (models.UniqueConstraint(fields=("project", "label", "name", "card"), name="one_baseline"),)


class Token(models.Model):
    """The credential of a program; only its hash is stored."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="tokens")
    user = models.ForeignKey(User, models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=80)
    hash = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=8, choices=[("read", "read"), ("write", "read and write")])
    made = models.DateTimeField(auto_now_add=True)
    expires = models.DateTimeField()
    revoked = models.DateTimeField(null=True)


class Invitation(models.Model):
    """A one-time link, stored as the hash of its secret: to set the server up (without a team) or to join a team."""

    hash = models.CharField(max_length=64, unique=True)
    team = models.ForeignKey(Team, models.CASCADE, null=True)
    email = models.EmailField(blank=True)
    role = models.PositiveSmallIntegerField(choices=ROLES, default=Role.owner)
    expires = models.DateTimeField()
    invited_by = models.ForeignKey(User, models.CASCADE, null=True)


class Audit(models.Model):
    """An entry about a change of who may see or do something."""

    team = models.ForeignKey(Team, models.CASCADE, null=True, related_name="audits")
    user = models.ForeignKey(User, models.SET_NULL, null=True)
    when = models.DateTimeField(auto_now_add=True)
    what = models.CharField(max_length=40)
    about = models.CharField(max_length=300)

    class Meta:
        """An index for a team's audit page."""

        indexes = (models.Index(fields=("team", "-id"), name="newest_audits"),)
