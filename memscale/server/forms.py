"""The forms of the pages; Django validates them and shows errors next to each field."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth.password_validation import validate_password

from memscale.server.models import ROLES, Role, User

_SLUG = r"^[a-z0-9][a-z0-9-]{0,39}$"


class Passwords(forms.Form):
    """A new password, twice."""

    password = forms.CharField(
        strip=False,
        max_length=200,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Ten characters or more.",
    )
    again = forms.CharField(
        label="Password again",
        strip=False,
        max_length=200,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )

    def clean(self) -> dict[str, Any]:
        found: dict[str, Any] = super().clean() or self.cleaned_data
        password = found.get("password")
        if password:
            validate_password(password, User(email=found.get("email", self.initial.get("email", ""))))
            if found.get("again") != password:
                self.add_error("again", "This differs from the password above.")
        return found


class SetUp(Passwords):
    """The first account and its team."""

    field_order = ("email", "password", "again", "team", "slug")
    email = forms.EmailField(label="Your e-mail address", widget=forms.EmailInput(attrs={"autocomplete": "username"}))
    team = forms.CharField(label="Name of the team", max_length=80)
    slug = forms.RegexField(
        _SLUG, label="Its name in addresses", help_text="Small letters, digits and hyphens, such as vision."
    )


class NewProject(forms.Form):
    """A project of the team."""

    name = forms.CharField(label="Name of the project", max_length=80)
    slug = forms.RegexField(
        _SLUG, label="Its name in addresses", help_text="Small letters, digits and hyphens, such as llama-8b."
    )


class Invite(forms.Form):
    """An address to invite, and its role."""

    email = forms.EmailField(label="E-mail address")
    role = forms.TypedChoiceField(choices=ROLES, coerce=int, initial=Role.member)


class ChangeRole(forms.Form):
    """A new role for a member; 0 removes the member."""

    role = forms.TypedChoiceField(choices=[*ROLES, (0, "remove")], coerce=int)


class NewToken(forms.Form):
    """A token for a program."""

    name = forms.CharField(label="What it is for", max_length=80)
    scope = forms.ChoiceField(choices=[("write", "read and write"), ("read", "read")])
    days = forms.IntegerField(label="Days until it expires", min_value=1, max_value=366, initial=90)


class NewBaseline(forms.Form):
    """The label under which a run becomes a baseline."""

    label = forms.RegexField(r"^[^\s#/?]{1,80}$", initial="main")
