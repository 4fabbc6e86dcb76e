"""Credentials never get into what is written down."""

import json

import pytest

from diloco_orchestrator.redaction import redact


def test_secrets_of_the_environment_are_replaced_wherever_they_stand():
    environ = {"HF_TOKEN": "hunter2-hunter2", "HOME": "/root/hunter3", "SHORT_KEY": "abc"}
    assert redact("login hunter2-hunter2 in /root/hunter3 abc", environ) == (
        "login <HF_TOKEN redacted> in /root/hunter3 abc"
    )


def test_secrets_inside_storage_options_are_replaced_and_what_is_no_secret_stays():
    inner = {"token": "t0ken-t0ken"}
    options = {"key": "AKIA0123456789", "secret": "hunter2hunter2", "endpoint_url": "http://store.example", "x": inner}
    environ = {"DILOCO_STORAGE_OPTIONS": json.dumps(options)}
    text = redact("AKIA0123456789 hunter2hunter2 http://store.example t0ken-t0ken", environ)
    assert text == "<key redacted> <secret redacted> http://store.example <token redacted>"


def test_user_info_and_signatures_in_urls_are_replaced():
    text = redact("https://me:pw@host/x?X-Amz-Signature=abcdef&a=1", {})
    assert text == "https://<redacted>@host/x?X-Amz-Signature=<redacted>&a=1"


@pytest.mark.parametrize(
    "name", ["API_KEY", "client_secret", "HF_TOKEN", "DB_PASSWORD", "MYSQL_PASSWD", "AWS_CREDENTIALS"]
)
def test_a_variable_that_is_named_like_a_credential_is_one(name):
    assert redact("it is hunter2-hunter2", {name: "hunter2-hunter2"}) == f"it is <{name} redacted>"


def test_what_was_handed_over_as_a_secret_is_one_whatever_its_name():
    environ = {"MY_LICENCE": "hunter2-hunter2", "MY_COLOUR": "blue-blue-blue"}
    words = "hunter2-hunter2 blue-blue-blue"
    assert redact(words, environ) == words
    declared = {**environ, "DILOCO_SECRET_NAMES": "OTHER,MY_LICENCE"}
    assert redact(words, declared) == "<MY_LICENCE redacted> blue-blue-blue"
