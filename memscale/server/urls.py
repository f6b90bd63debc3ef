"""The addresses of the site. A name without a row in `access.RULES` answers 404."""

from django.urls import include, path

from memscale.server import views
from memscale.server.api import api

handler404 = "memscale.server.views.missing"
handler500 = "memscale.server.views.failed"

_PROJECT = "t/<slug:team>/<slug:project>/"

urlpatterns = [
    path("healthz", views.healthz, name="healthz"),
    path("metrics", views.metrics, name="metrics"),
    path("setup/<str:secret>", views.setup, name="setup"),
    path("join/<str:secret>", views.join, name="join"),
    path("account/", include("allauth.account.urls")),
    path("account/2fa/", include("allauth.mfa.urls")),
    path("account/sessions/", include("allauth.usersessions.urls")),
    path("api/v1/", api.urls),
    path("", views.home, name="home"),
    path("t/<slug:team>/", views.team, name="team"),
    path("t/<slug:team>/-/project", views.new_project, name="new-project"),
    path("t/<slug:team>/-/invite", views.invite, name="invite"),
    path("t/<slug:team>/-/members/<int:member>", views.member, name="member"),
    path("t/<slug:team>/-/tokens", views.tokens, name="tokens"),
    path("t/<slug:team>/-/tokens/<int:token>", views.revoke, name="revoke"),
    path("t/<slug:team>/-/audit", views.audit, name="audit"),
    path("t/<slug:team>/-/plans", views.plans, name="plans"),
    path("t/<slug:team>/-/plans/<str:hash>", views.plan, name="plan"),
    path(_PROJECT, views.runs, name="runs"),
    path(_PROJECT + "runs/<str:uid>/", views.run, name="run"),
    path(_PROJECT + "runs/<str:uid>/baseline", views.baseline, name="baseline"),
    path(_PROJECT + "compare", views.compare, name="compare"),
    path(_PROJECT + "commits", views.commits, name="commits"),
    path(_PROJECT + "accuracy", views.accuracy, name="accuracy"),
]
