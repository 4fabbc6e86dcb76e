"""Credentials never get into what is written down."""

import json

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
