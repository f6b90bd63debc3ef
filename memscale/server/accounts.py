"""The adapter of django-allauth: no sign-up, no mail; changes of accounts go to the audit log instead."""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest

from memscale.server.models import Audit


class Accounts(DefaultAccountAdapter):
    """Accounts are made by one-time links only, and no mail is sent."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Sends nothing; the audit log has the entry."""

    def send_notification_mail(self, template_prefix: str, user: Any, *args: Any, **kwargs: Any) -> None:
        """Adds what would be mailed (a changed password, a removed second factor) to the teams' audit logs."""
        what = template_prefix.rpartition("/")[2].replace("_", " ")
        for membership in user.memberships.all():
            Audit.objects.create(team=membership.team, user=user, what=what[:40], about=user.email)
