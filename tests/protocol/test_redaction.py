"""Every form in which a credential was seen to reach a log or record: it is replaced, or refused before the launch."""

import base64
import json
import re
import shlex
from urllib.parse import quote, quote_plus

import pytest

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.redaction import has_token_shape, looks_secret, redact

SECRET = "pa\"ss/w\\ör+d's &end="
PLAIN = "hunter2-hunter2-hunter2"
LINES = [f"MIIEvQIBADANBgkqhkiG9w0BAQEFAASC{number}" for number in range(4)]
PEM = "\n".join(["-----BEGIN KEY-----", *LINES, "-----END KEY-----"])
ENVIRON = {"API_KEY": SECRET, "HF_TOKEN": PLAIN, "SIGNING_KEY": PEM}


def wrapped(before: str, secret: str, encode: object = base64.b64encode) -> str:
    return encode((before + secret + " and more").encode()).decode()  # type: ignore[operator]


FORMS = {
    "as it is": f"login {SECRET}",
    "JSON": json.dumps({"password": SECRET}),
    "JSON with letters as they are": json.dumps({"password": SECRET}, ensure_ascii=False),
    "JSON in JSON": json.dumps(json.dumps({"password": SECRET})),
    "Python": repr({"password": SECRET}),
    "URL": f"https://host/?p={quote(SECRET, safe='')}",
    "URL, path": f"https://host/{quote(SECRET)}",
    "form": f"password={quote_plus(SECRET)}",
    "URL in lower case": f"password={re.sub('%..', lambda found: found[0].lower(), quote_plus(SECRET))}",
    "shell": f"export P={shlex.quote(SECRET)}",
    "double quotes": 'P="' + SECRET.replace('"', '\\"') + '"',
    "base64": wrapped("", PLAIN),
    "base64, one byte before": wrapped(":", PLAIN),
    "base64, two bytes before": wrapped("u:", PLAIN),
    "base64 for URLs": wrapped("", SECRET, base64.urlsafe_b64encode),
    "base64 for URLs, one byte before": wrapped(":", SECRET, base64.urlsafe_b64encode),
    "base64 for URLs, two bytes before": wrapped("u:", SECRET, base64.urlsafe_b64encode),
    "hex": PLAIN.encode().hex(),
    "hex in capitals": PLAIN.encode().hex().upper(),
    "a line of a key": PEM.splitlines()[2],
    "a key in JSON": json.dumps(PEM),
    "a line of a key in base64": base64.b64encode(PEM.splitlines()[3].encode()).decode(),
    "basic authorization": f"Authorization: Basic {base64.b64encode(b'user:' + PLAIN.encode()).decode()}",
}


LONG = "Zq7-Lm2_Xw9.Kd4~Rt6+Vb1/Ny3="
SHORT_ENDED = "\n".join(["-----BEGIN KEY-----", *LINES, "Qw=", "-----END KEY-----"])
IN_A_LIST = json.dumps({"client_kwargs": {"endpoint_url": "https://host"}, "keys": [{"secret": [PLAIN]}]})
SIGNED = "https://b.example/k?X-Amz-Credential=AKID%2Fx&X-Amz-Signature=0123abcd0123abcd&X-Amz-Expires=60"


@pytest.mark.parametrize(
    ("text", "environ", "hidden"),
    [
        (f"logged in with {LONG[:12]}...", {"API_KEY": LONG}, LONG[:12]),
        (f"key: {LONG[:12]}", {"API_KEY": LONG}, LONG[:12]),
        ("\n".join(f"  | {line}" for line in SHORT_ENDED.splitlines()), {"SIGNING_KEY": SHORT_ENDED}, "Qw="),
        (json.dumps({"k": SHORT_ENDED}), {"SIGNING_KEY": SHORT_ENDED}, "Qw="),
        ("cloning https://u:p/w@host.example/x", {}, "p/w"),
        ("postgres://app:a/b/c@db:5432/x failed", {}, "a/b/c"),
        (f"denied: {PLAIN}", {"DILOCO_STORAGE_OPTIONS": IN_A_LIST}, PLAIN),
        (f"next={quote(SIGNED, safe='')}&more=1", {}, "0123abcd0123abcd"),
        (f"next={quote(quote(SIGNED, safe=''), safe='')}", {}, "0123abcd0123abcd"),
        (f"next={quote(SIGNED, safe='')}&more=1", {}, "AKID"),
    ],
)
def test_a_credential_in_part_or_in_another_text_is_replaced(text: str, environ: dict[str, str], hidden: str):
    shown = redact(text, environ)
    assert hidden in text and hidden not in shown and "redacted>" in shown
    assert "more=1" in shown or "more=1" not in text


def test_the_beginning_of_a_path_or_a_url_is_no_credential():
    environ = {"SSH_KEY": "/home/me/.ssh/id_of_the_project", "DB_URL": "https://host.example/database"}
    words = "reading /home/me/.ssh/config from https://host.example/other, port http://host:8080/x"
    assert redact(words, environ) == words


def hidden_parts() -> list[str]:
    """What a reader could make a secret of again: any long part of it, plain or encoded."""
    parts = []
    for secret in (SECRET, PLAIN, *PEM.splitlines()[1:-1]):
        raw = secret.encode()
        for before in (b"", b":", b"u:", b"user:", b'{"password": "'):
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                parts.append(encode(before + raw).decode().rstrip("=")[len(before) * 4 // 3 + 2 : -2])
        parts += [secret, raw.hex(), raw.hex().upper(), quote(secret, safe=""), json.dumps(secret)[1:-1]]
    return parts


@pytest.mark.parametrize("form", FORMS)
def test_a_declared_secret_is_replaced_in_every_form(form: str):
    shown = redact(FORMS[form], ENVIRON)
    assert "redacted>" in shown
    assert not [part for part in hidden_parts() if part in shown]


def test_what_is_no_secret_stays_as_it_is():
    words = "replica 3 of /home/me: loss 0.25, sha256 " + "ab12" * 16 + ", tokenizer gpt2, b3:" + "0f" * 32
    assert redact(words, {**ENVIRON, "PWD": "/home/me", "TOKENIZERS_PARALLELISM": "tokenizer"}) == words
    git = "commit " + "c" * 40
    assert redact(git, {}) == git


def test_short_secrets_are_replaced_where_they_stand_alone():
    environ = {"PIN": "4711", "DILOCO_SECRET_NAMES": "PIN"}
    assert redact("pin 4711, step 47110, 'x4711'", environ) == "pin <PIN redacted>, step 47110, 'x4711'"


TOKENS = [
    "hf_" + "aB3" * 12,
    "diloco-key-" + "aB-" * 14 + "_",  # of a signed run
    "github_pat_11ABCDEFG0" + "x9" * 20,
    "ghp_" + "aB3" * 12,
    "glpat-" + "aB3x" * 5,
    "AKIA" + "IOSFODNN7EXAMPLE"[:16],
    "ASIA" + "IOSFODNN7EXAMPLE"[:16],
    "sk-proj-" + "aB3" * 12,
    "sk-ant-api03-" + "aB3" * 12,
    "as-" + "aB3x" * 5 + "yz",
    "xoxb-" + "12345-" * 4,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVPmB92K27uhbUJU1p1r",
    "k8s-aws-v1.aHR0cHM6Ly9zdHMuYW1hem9uYXdzLmNvbQ",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_of_a_known_kind_is_replaced_though_nobody_declared_it(token: str):
    assert redact(f"got '{token}' back", {}) == "got '<token redacted>' back"
    assert has_token_shape(f"x={token}")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer <token redacted>"),
        ("{'authorization': 'Bearer abc.def-123'}", "{'authorization': 'Bearer <token redacted>'}"),
        ("curl with bearer " + "a1" * 12, "curl with bearer <token redacted>"),
        ("aws_secret_access_key = " + "aB3/" * 10, "aws_secret_access_key = <token redacted>"),
        ("WANDB_API_KEY=" + "0f" * 20, "WANDB_API_KEY=<token redacted>"),
        ("wandb login " + "0f" * 20, "wandb login <token redacted>"),
        ("the bearer of this message", "the bearer of this message"),
    ],
)
def test_a_token_that_only_the_words_before_it_tell_is_replaced(words: str, shown: str):
    assert redact(words, {}) == shown


@pytest.mark.parametrize(
    "name",
    ["GPG_PASSPHRASE", "DB_PWD", "MYSQL_PWD", "SENTRY_DSN", "SMTP_PASS", "DATABASE_URL", "DB_URL", "REDIS_AUTH"],
)
def test_more_names_of_credentials(name: str):
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "PATH", "COMPASS_DIR", "AUTHOR"])
def test_names_of_other_things(name: str):
    assert not looks_secret(name)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"args": {"hf_token": "x" * 20}}, "args.hf_token"),
        ({"args": {"token": "x"}}, "args.token"),
        ({"args": {"wandb": {"api_key": "x" * 40}}}, "args.wandb.api_key"),
        ({"args": {"db": "postgres://u:pw@host/x"}}, "args.db"),
        ({"args": {"sources": ["s3://a", "https://u:pw@host/x"]}}, "args.sources"),
        ({"args": {"passphrase": "x"}}, "args.passphrase"),
        ({"args": {"x": ["deep", {"password": "pw@"}]}}, "args.x.password"),
        ({"args": {"x": [[{"y": [{"token": "pw@"}]}]]}}, "args.x.y.token"),
        ({"args": {TOKENS[0]: 1}}, "args.<a name that is a credential>"),
        ({"args": {"x": {TOKENS[0]: {"y": 1}}}}, "args.x.<a name that is a credential>"),
        ({"env": {TOKENS[0]: "1"}}, "env.<a name that is a credential>"),
        ({"track": f"wandb:{TOKENS[0]}"}, "track"),
        ({"track": "tensorboard:https://u:p/w@host/x"}, "track"),
        ({"args": {"note": TOKENS[0]}}, "args.note"),
        ({"env": {"UPSTREAM": "postgres://u:pw@host/x"}}, "env.UPSTREAM"),
        ({"env": {"UPSTREAM": TOKENS[1]}}, "env.UPSTREAM"),
        ({"env": {"DB_URL": "postgres://u:pw@host/x"}}, "DB_URL"),
    ],
)
def test_a_credential_among_settings_is_refused_and_not_shown(settings: dict, where: str):
    with pytest.raises(ConfigError, match=rf"{where}.*secret") as refused:
        make_config({"entrypoint": "m:f", **settings})
    assert "pw@" not in str(refused.value) and TOKENS[0] not in str(refused.value)


def test_a_token_in_place_of_a_tracker_is_not_shown():
    with pytest.raises(ConfigError, match="unknown tracker '<token redacted>'"):
        make_config({"entrypoint": "m:f", "track": TOKENS[0]})


def test_settings_that_are_no_credentials_pass():
    args = {"pad_token": "<|endoftext|>", "text_key": "document", "key_dim": 64, "num_key_value_heads": 8}
    args |= {"tokenizer": "gpt2", "max_tokens": 4096, "url": "https://host/x", "token": 5, "eos_token": "</s>"}
    assert make_config({"entrypoint": "m:f", "args": args, "env": {"HF_HOME": "/data"}}).args == args
