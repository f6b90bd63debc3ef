"""What django-allauth is told about accounts here: nobody signs up, and who comes and goes is in the audit."""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest

from memscale.server.models import Audit


class Accounts(DefaultAccountAdapter):
    """Accounts are made by links alone; no mail is sent."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Nothing: the audit has it."""

    def send_notification_mail(self, template_prefix: str, user: Any, *args: Any, **kwargs: Any) -> None:
        """Writes what would be mailed (a password changed, a second factor removed) into the audits of the teams."""
        what = template_prefix.rpartition("/")[2].replace("_", " ")
        for membership in user.memberships.all():
            Audit.objects.create(team=membership.team, user=user, what=what[:40], about=user.email)
