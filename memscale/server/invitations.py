"""One-time links for the first account and for invitations to a team; only the hash of a link's secret is stored."""

from __future__ import annotations

import secrets
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from memscale.server.models import Audit, Invitation, Membership, Role, Team, User
from memscale.server.tokens import hashed

LIVES = {"setup": timedelta(minutes=15), "join": timedelta(days=3)}


def set_up_secret() -> str | None:
    """Returns a new secret for the set-up link, which replaces an earlier one; None if there is an account."""
    with transaction.atomic():
        Invitation.objects.filter(team=None).delete()
        if User.objects.exists():
            return None
        return _made("setup", team=None)


def invite_to(team: Team, email: str, role: Role, by: User | None) -> str:
    """Returns the secret of a link for `email`, which replaces an earlier link to the same team."""
    email = User.objects.normalize_email(email).lower()
    with transaction.atomic():
        Invitation.objects.filter(team=team, email=email).delete()
        Audit.objects.create(team=team, user=by, what="invited", about=f"{email}: {role.name}")
        return _made("join", team=team, email=email, role=role, invited_by=by)


def found(secret: str, *, team: bool) -> Invitation | None:
    """Returns the invitation of a link's secret; None if it is unknown, used or expired."""
    live = Invitation.objects.select_related("team").filter(hash=hashed(secret), expires__gt=timezone.now())
    return live.filter(team__isnull=not team).first()


@transaction.atomic
def set_up(invitation: Invitation, email: str, password: str, team: str, slug: str) -> User | None:
    """Creates the first account and its team; returns None if the link was used in the meantime."""
    if not Invitation.objects.filter(pk=invitation.pk).delete()[0] or User.objects.exists():
        return None
    user = User.objects.create_user(email, password)
    made = Team.objects.create(name=team, slug=slug)
    Membership.objects.create(team=made, user=user, role=Role.owner)
    Audit.objects.create(team=made, user=user, what="set up", about=f"{team} by {user.email}")
    return user


@transaction.atomic
def join(invitation: Invitation, user: User | None, password: str) -> User | None:
    """Makes the invited user a member and returns the user; None if the link was used in the meantime.

    Args:
        invitation: the result of `found`.
        user: the signed-in user with the invited address. None creates the account, or sets a new password for it if
            the server's own command made the link.
        password: the account's password, used if `user` is None.
    """
    if not Invitation.objects.filter(pk=invitation.pk).delete()[0]:
        return None
    if user is None:
        user = User.objects.filter(email=invitation.email).first()
        if user is None:
            user = User.objects.create_user(invitation.email, password)
        else:
            assert resets_password(invitation), "an owner of one team must not take over an account of another"
            user.set_password(password)
            user.save()
    Membership.objects.update_or_create(team=invitation.team, user=user, defaults={"role": invitation.role})
    role = Role(invitation.role).name
    Audit.objects.create(team=invitation.team, user=user, what="joined", about=f"{user.email}: {role}")
    return user


def resets_password(invitation: Invitation) -> bool:
    """Whether the link may set the password of an existing account: only links of the server's own command may."""
    return invitation.invited_by_id is None


def _made(kind: str, **fields: object) -> str:
    secret = secrets.token_urlsafe(32)
    Invitation.objects.create(hash=hashed(secret), expires=timezone.now() + LIVES[kind], **fields)
    return secret
