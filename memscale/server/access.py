"""Access rights: `RULES` has a row for each page and API route, and `Access` is the one source of a team's data.

A route without a row answers 404 to everybody. `middleware.Gate` enforces the rules for pages, `tokens.TokenAuth` for
the API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import transaction

from memscale.server.models import Audit, Baseline, Membership, Plan, Project, Role, Run, Team, Token, User
from memscale.server.problems import Problem


@dataclass(frozen=True)
class Rule:
    """What a route requires.

    Attributes:
        who: ``"anyone"``, ``"signed in"``, a ``"member"`` of the team in the URL, or a ``"token"`` of a team.
        role: the lowest role in the team.
        scope: the lowest scope of the token.
        fresh: whether the password must have been entered within the last minutes.
    """

    who: str
    role: Role = Role.viewer
    scope: str = "read"
    fresh: bool = False


_ALLAUTH = "account_logout account_reauthenticate account_change_password mfa_index mfa_reauthenticate"
_ALLAUTH += " mfa_activate_totp mfa_deactivate_totp mfa_view_recovery_codes mfa_generate_recovery_codes"
_ALLAUTH += " mfa_download_recovery_codes usersessions_list"
_PAGES = ("team", "revoke", "runs", "run", "compare", "commits", "accuracy", "plans", "plan")
_READ = ("projects", "runs", "run", "plan", "baselines", "members", "tokens")

RULES: dict[str, Rule] = {
    **dict.fromkeys(("healthz", "setup", "join", "account_login", "mfa_authenticate"), Rule("anyone")),
    **dict.fromkeys(("home", *_ALLAUTH.split()), Rule("signed in")),
    **dict.fromkeys(_PAGES, Rule("member")),
    "new-project": Rule("member", Role.maintainer),
    "invite": Rule("member", Role.owner, fresh=True),
    "member": Rule("member", Role.owner, fresh=True),
    "audit": Rule("member", Role.owner),
    "tokens": Rule("member", fresh=True),
    "baseline": Rule("member", Role.maintainer),
    "metrics": Rule("token"),
    "GET api-1:openapi-json": Rule("anyone"),
    **{f"GET api-1:{name}": Rule("token") for name in _READ},
    "POST api-1:projects": Rule("token", Role.maintainer, "write"),
    "POST api-1:runs": Rule("token", Role.member, "write"),
    "PUT api-1:baselines": Rule("token", Role.maintainer, "write"),
    "DELETE api-1:token": Rule("token", scope="write"),
}


@dataclass(frozen=True)
class Access:
    """The data that one request may see; pages and API read a team's data only through this class."""

    user: User
    team: Team
    role: Role
    token: Token | None = None

    @property
    def projects(self) -> Any:
        """The team's projects."""
        return Project.objects.filter(team=self.team)

    @property
    def runs(self) -> Any:
        """The runs of all the team's projects."""
        return Run.objects.filter(project__team=self.team).select_related("project")

    @property
    def plans(self) -> Any:
        """The plans of the team's runs."""
        return Plan.objects.filter(team=self.team)

    @property
    def baselines(self) -> Any:
        """The baselines of all the team's projects."""
        return Baseline.objects.filter(project__team=self.team).select_related("run")

    @property
    def memberships(self) -> Any:
        """The team's members with their roles."""
        return Membership.objects.filter(team=self.team).select_related("user").order_by("user__email")

    @property
    def tokens(self) -> Any:
        """The user's tokens; for an owner, the tokens of all members."""
        found = Token.objects.filter(team=self.team).select_related("user")
        return found if self.role >= Role.owner else found.filter(user=self.user)

    @property
    def audits(self) -> Any:
        """The team's audit log, newest entry first."""
        return Audit.objects.filter(team=self.team).select_related("user").order_by("-id")

    def project(self, slug: str) -> Project:
        """Returns the team's project of this name.

        Raises:
            Problem: 404 if there is none.
        """
        found: Project | None = self.projects.filter(slug=slug).first()
        if found is None:
            raise Problem(404, f"there is no project {slug!r}", "a run goes into one that exists", "check the address")
        return found

    def run(self, project: str, uid: str) -> Run:
        """Returns the run of a project with this whole id.

        Raises:
            Problem: 404 if there is none.
        """
        runs = self.runs.filter(project=self.project(project), uid=uid).select_related("plan", "sent_by")
        found: Run | None = runs.first()
        if found is None:
            raise Problem(404, f"there is no run {uid!r}", "a run is named by its whole id", "see the list of runs")
        return found

    def made_project(self, slug: str, name: str) -> Project | None:
        """Creates a project of the team and returns it; None if there is one with this slug."""
        with transaction.atomic():
            project, is_new = Project.objects.get_or_create(team=self.team, slug=slug, defaults={"name": name})
            if is_new:
                self.noted("project made", slug)
        return project if is_new else None

    def may(self, role: Role) -> bool:
        """Whether the user has at least the role `role`."""
        return self.role >= role

    def noted(self, what: str, about: str) -> None:
        """Adds an entry to the team's audit log."""
        Audit.objects.create(team=self.team, user=self.user, what=what, about=about[:300])


def access_of(user: User, team: str, token: Token | None = None) -> Access | None:
    """Returns the access of `user` to a team, or None if the user is no active member."""
    found = Membership.objects.select_related("team").filter(team__slug=team, user=user).first()
    return None if found is None or not user.is_active else Access(user, found.team, Role(found.role), token)
