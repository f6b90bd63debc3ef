"""Django's settings, from the environment: DATABASE_URL, MEMSCALE_PUBLIC_URL, MEMSCALE_STATE.

Django's own defaults stand where they are right: no debugging, UTC, sessions of 14 days in cookies that scripts cannot
read and other sites do not send, no frames, no referrer to other sites.
"""

import os
from datetime import timedelta
from pathlib import Path

import dj_database_url
from csp.constants import NONE, SELF

from memscale.core import state_folder
from memscale.server.commands import host_of, secret_key

FOLDER = Path(__file__).parent
STATE = state_folder()
PORT = os.environ.get("MEMSCALE_PORT", "8765")
PUBLIC_URL = os.environ.get("MEMSCALE_PUBLIC_URL", "")

SECRET_KEY = os.environ.get("MEMSCALE_SECRET_KEY") or secret_key(STATE)
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]", *([host_of(PUBLIC_URL)] if PUBLIC_URL else [])]

DATABASES = {"default": dj_database_url.config(default=f"sqlite:///{STATE / 'server.db'}", conn_max_age=0)}
ON_SQLITE = "sqlite" in DATABASES["default"]["ENGINE"]
if ON_SQLITE:
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -16384;",
    }
else:
    # Under ASGI each request has its own thread, so a persistent connection would never be reused; a pool is.
    DATABASES["default"].setdefault("OPTIONS", {})["pool"] = {"min_size": 2, "max_size": 12, "timeout": 20}

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "memscale.server",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.usersessions",
    "csp",
    "ninja",
]
MIDDLEWARE = [
    "memscale.server.middleware.Failures",
    "django.middleware.security.SecurityMiddleware",
    "csp.middleware.CSPMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "allauth.usersessions.middleware.UserSessionsMiddleware",
    "memscale.server.middleware.Gate",
]
ROOT_URLCONF = "memscale.server.urls"
ASGI_APPLICATION = "memscale.server.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [FOLDER / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
            "builtins": ["memscale.server.templatetags.figures"],
        },
    }
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_I18N = False
STATIC_URL = "/static/"
# The reports' style sheet, which the pages share.
STATICFILES_DIRS = [("reports", FOLDER.parent / "reports" / "templates")]
WHITENOISE_USE_FINDERS = True
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    "loggers": {"django.security": {"level": "ERROR"}, "django.request": {"level": "ERROR"}},
}

# Accounts have an e-mail address and a password. The server sends no mail: people hand links over themselves.
AUTH_USER_MODEL = "server.User"
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
_PASSWORD_RULES = {
    "UserAttributeSimilarityValidator": {},
    "CommonPasswordValidator": {},
    "MinimumLengthValidator": {"min_length": 10},
}
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}", "OPTIONS": options}
    for name, options in _PASSWORD_RULES.items()
]
EMAIL_BACKEND = "django.core.mail.backends.dummy.EmailBackend"
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_ADAPTER = "memscale.server.accounts.Accounts"
ACCOUNT_SESSION_REMEMBER = True
ACCOUNT_REAUTHENTICATION_TIMEOUT = 600
ALLAUTH_TRUSTED_PROXY_COUNT = 1 if PUBLIC_URL else 0
MFA_TOTP_ISSUER = "memscale"
LOGIN_REDIRECT_URL = "/"
LOGIN_URL = "/account/login/"

# Cookies and security headers.
CSRF_COOKIE_HTTPONLY = True
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = bool(PUBLIC_URL)
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL] if PUBLIC_URL else []
CSRF_FAILURE_VIEW = "memscale.server.views.forged"
if PUBLIC_URL:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_HSTS_SECONDS = int(timedelta(days=365).total_seconds())
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "style-src": [SELF],
        "script-src": [SELF],
        "img-src": [SELF, "data:"],  # for the QR code of a second factor
        "form-action": [SELF],
        "frame-ancestors": [NONE],
        "base-uri": [NONE],
    }
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 1 << 20
DATA_UPLOAD_MAX_NUMBER_FIELDS = 200
