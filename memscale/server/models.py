"""What the server keeps. Texts that clients set are stored as they came and escaped where they are shown."""

from __future__ import annotations

import enum

from django.contrib.auth.models import AbstractBaseUser, BaseUserManager
from django.db import models


class Role(enum.IntEnum):
    """What a member may do; each includes those below it."""

    viewer = 10
    member = 20
    maintainer = 30
    owner = 40


ROLES = [(role.value, role.name) for role in Role]


class Users(BaseUserManager):
    """Makes accounts, which have an e-mail address in place of a name."""

    def create_user(self, email: str, password: str) -> User:
        """An account that is saved, with the password's hash."""
        user: User = self.model(email=self.normalize_email(email).lower())
        user.set_password(password)
        user.save()
        return user


class User(AbstractBaseUser):
    """A person, or a program with a person's account. Roles are those of teams: there is no superuser."""

    email = models.EmailField(unique=True)
    is_active = models.BooleanField(default=True)
    USERNAME_FIELD = "email"
    REQUIRED_FIELDS = ()
    objects = Users()


class Team(models.Model):
    """People who see each other's runs. Nothing is shared between teams."""

    slug = models.SlugField(max_length=40, unique=True)
    name = models.CharField(max_length=80)
    made = models.DateTimeField(auto_now_add=True)


class Membership(models.Model):
    """A user's role in a team."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, models.CASCADE, related_name="memberships")
    role = models.PositiveSmallIntegerField(choices=ROLES)

    class Meta:
        """One role for each user of a team."""

        constraints = (models.UniqueConstraint(fields=("team", "user"), name="one_role"),)


class Project(models.Model):
    """Runs that are compared with each other."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="projects")
    slug = models.SlugField(max_length=40)
    name = models.CharField(max_length=80)
    made = models.DateTimeField(auto_now_add=True)

    class Meta:
        """One project for each name of a team."""

        constraints = (models.UniqueConstraint(fields=("team", "slug"), name="one_project"),)


class Plan(models.Model):
    """A plan by the hash of its rules, which the server has checked; never changed."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="plans")
    hash = models.CharField(max_length=64)
    document = models.TextField()
    made = models.DateTimeField(auto_now_add=True)

    class Meta:
        """One row for each plan of a team."""

        constraints = (models.UniqueConstraint(fields=("team", "hash"), name="one_plan"),)


class Run(models.Model):
    """What lists, filters and orders runs; the document itself is a row of `Document`, so that lists stay quick.

    A run with a plan and a measured peak is also the evidence for the plan: for this model, card and budget, by whom.
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
        """An index for each order of the list, with and without a filter, and one for what a plan has proven."""

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
        """Whether the card has what the step takes, as predicted and as measured."""
        return max(self.taken_bytes, self.measured_bytes or 0) <= self.usable_bytes


class Document(models.Model):
    """A run as the client sent it: JSON of the closed schema, its measurements apart."""

    run = models.OneToOneField(Run, models.CASCADE, primary_key=True, related_name="document")
    text = models.TextField()


class Measurement(models.Model):
    """One figure that was measured of a run."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="measurements")
    name = models.CharField(max_length=80)
    value = models.FloatField()

    class Meta:
        """One value for each name of a run."""

        constraints = (models.UniqueConstraint(fields=("run", "name"), name="one_measurement"),)


class Baseline(models.Model):
    """The run that later ones of its name and card are held against, under a label such as ``main``."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="baselines")
    label = models.CharField(max_length=80)
    name = models.CharField(max_length=200)
    card = models.CharField(max_length=80)
    run = models.ForeignKey(Run, models.CASCADE, related_name="baselines")

    class Meta:
        """One run for each label, name and card of a project."""

        constraints = (models.UniqueConstraint(fields=("project", "label", "name", "card"), name="one_baseline"),)


class Token(models.Model):
    """What a program shows in place of a password; only its hash is kept."""

    team = models.ForeignKey(Team, models.CASCADE, related_name="tokens")
    user = models.ForeignKey(User, models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=80)
    hash = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=8, choices=[("read", "read"), ("write", "read and write")])
    made = models.DateTimeField(auto_now_add=True)
    expires = models.DateTimeField()
    revoked = models.DateTimeField(null=True)


class Invitation(models.Model):
    """A one-time link, by the hash of its secret: to set the server up (no team), or to join a team."""

    hash = models.CharField(max_length=64, unique=True)
    team = models.ForeignKey(Team, models.CASCADE, null=True)
    email = models.EmailField(blank=True)
    role = models.PositiveSmallIntegerField(choices=ROLES, default=Role.owner)
    expires = models.DateTimeField()
    invited_by = models.ForeignKey(User, models.CASCADE, null=True)


class Audit(models.Model):
    """Who did what that changes who may see or do something."""

    team = models.ForeignKey(Team, models.CASCADE, null=True, related_name="audits")
    user = models.ForeignKey(User, models.SET_NULL, null=True)
    when = models.DateTimeField(auto_now_add=True)
    what = models.CharField(max_length=40)
    about = models.CharField(max_length=300)

    class Meta:
        """An index for a team's page."""

        indexes = (models.Index(fields=("team", "-id"), name="newest_audits"),)
