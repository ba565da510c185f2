"""What is shown of a text, of a command line, of a job: all but its secrets."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.contract.redaction import HIDDEN, Redacting, hidden_in, names_secret, redacted, redacted_json

AWS = "AKIA" + "THINWIRETEST0000"
GITHUB = "ghp_" + "0123456789abcdefABCDEF0123456789abcd"
HIDES = [
    ("s3://KEY:SECRET@bucket/a", "s3://***@bucket/a"),
    ("s3://KEY:SE/CR+ET@bucket/a", "s3://***@bucket/a"),
    ("redis://:hunter2@host/0", "redis://***@host/0"),
    ("https://hunter2@git.example.com/r", "https://***@git.example.com/r"),
    ("git+https://me:hunter2@git.example.com/r@main", "git+https://***@git.example.com/r@main"),
    ("DATABASE_URL=postgresql+psycopg://me:hunter2@db/a", "DATABASE_URL=postgresql+psycopg://***@db/a"),
    ("https://b.s3.amazonaws.com/k?X-Amz-Signature=0ab&x=1", "https://b.s3.amazonaws.com/k?X-Amz-Signature=***&x=1"),
    ("https://h/x?a=1&token=hunter2#c", "https://h/x?a=1&token=***#c"),
    ("https://a.blob.core.windows.net/c?sv=1&sig=hunter2", "https://a.blob.core.windows.net/c?sv=1&sig=***"),
    ("AccountName=a;AccountKey=hunter2==;End=b", "AccountName=a;AccountKey=***;End=b"),
    ("host=db password=hunter2 dbname=a", "host=db password=*** dbname=a"),
    ("PGPASSWORD=hunter2 psql", "PGPASSWORD=*** psql"),
    ('{"apiKey": "hunter2", "a": 1}', '{"apiKey": "***", "a": 1}'),
    ("password: hunter2", "password: ***"),
    ("  password : hunter2", "  password : ***"),
    ("password: hunter2\r\na: b", "password: ***\r\na: b"),
    ("db:\n  - password: hunter2  # of the lab", "db:\n  - password: ***  # of the lab"),
    ("password: 'hunter2',", "password: '***',"),
    ("{user: me, password: hunter2} a", "{user: me, password: ***} a"),
    ("> X-Auth-Token: hunter2", "> X-Auth-Token: ***"),
    ("ValueError: invalid token: 0123456789abcdefX in a", "ValueError: invalid token: *** in a"),
    ("os.environ.setdefault('HF_TOKEN', '0123456789abcdefX')", "os.environ.setdefault('HF_TOKEN', '***')"),
    ("redis://:hunt/er2@host/0", "redis://***@host/0"),
    ("authorization: token hunter2", "authorization: ***"),
    ('export PASSWORD="correct horse, battery & hunter2"', 'export PASSWORD="***"'),
    ("password='a;hunter2'", "password='***'"),
    ('password="a\\"hunter2"', 'password="***"'),
    (r'body "{\"password\": \"correct hunter2\"}"', r'body "{\"password\": \"***\"}"'),
    ("os.environ['PGPASSWORD']='hunter2'", "os.environ['PGPASSWORD']='***'"),
    ("run(\"PGPASSWORD='a hunter2' psql\")", "run(\"PGPASSWORD='***' psql\")"),
    ("train.py --api-key hunter2 --lr 1", "train.py --api-key *** --lr 1"),
    ("Authorization: Bearer 0123456789abcdef", "Authorization: ***"),
    ("curl -H 'Authorization: Basic aHVudGVyMg==' https://h", "curl -H 'Authorization: ***' https://h"),
    ('headers {"Authorization": "Basic aHVudGVyMg=="}', 'headers {"Authorization": "***"}'),
    (r"{\"authorization\": \"ApiKey hunter2\", \"a\": 1}", r"{\"authorization\": \"***\", \"a\": 1}"),
    ('Proxy-Authorization: Digest username="me", response="hunter2"', "Proxy-Authorization: ***"),
    ("got Authorization: AWS4-HMAC-SHA256 Credential=A/b, Signature=0a", "got Authorization: ***"),
    ("curl -H 'Cookie: sid=hunter2; theme=dark' https://h", "curl -H 'Cookie: ***' https://h"),
    ("< Set-Cookie: sid=hunter2; Path=/; HttpOnly", "< Set-Cookie: ***"),
    ('{"Set-Cookie": "sid=hunter2; Path=/"}', '{"Set-Cookie": "***"}'),
    ("curl -H 'X-Api-Key: hunter2' https://h", "curl -H 'X-Api-Key: ***' https://h"),
    ("password=$USER-hunter2 a", "password=*** a"),
    ("password=${PASSWORD:-hunter2} a", "password=***} a"),
    ('token="${PREFIX}hunter2"', 'token="***"'),
    ("secret=$2b$12$abcdefghij a", "secret=*** a"),
    ("password=%hunter2 a", "password=*** a"),
    ("<password>hunter2</password>", "<password>***</password>"),
    ('<c:password type="text">hunter2 b</c:password>', '<c:password type="text">***</c:password>'),
    ('<add key="DbPassword" value="hunter2"/>', '<add key="DbPassword" value="***"/>'),
    ('--env {"name": "PGPASSWORD", "value": "hunter2 b"}', '--env {"name": "PGPASSWORD", "value": "***"}'),
    (r'"{\"name\": \"PGPASSWORD\", \"value\": \"hunter2\"}"', r'"{\"name\": \"PGPASSWORD\", \"value\": \"***\"}"'),
    ('--config={"db":{"password":"hunter2"}}', '--config={"db":{"password":"***"}}'),
    (f"a {AWS} b", "a *** b"),
    (f"a {GITHUB} b", "a *** b"),
    ("a hf_0123456789abcdefABCD b", "a *** b"),
    ("a eyJhbGciOiJI.eyJzdWIiOiIx.abc b", "a *** b"),
    ("x\n-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\ny", "x\n***\ny"),
]
AMIDST = {"os.environ.setdefault('HF_TOKEN', '***')", "a *** b", "x\n***\ny", "train.py --api-key *** --lr 1"}
"""What is not known again as a text in which something was hidden."""
STAYS = [
    "abfss://container@account.dfs.core.windows.net/a",
    "sftp://me@host/a",
    "http://[::1]:8400/a@b",
    "https://host:8400/a@b",
    "hdfs://host/a?replication=2",
    "tokens=4096 max_tokens=5 pad_token=<pad> key=text sort_key=name",
    "recipe.env_vars.HF_TOKEN: must be under recipe.secrets, secrets: {HF_TOKEN: {env: HF_TOKEN}}",
    "token_type_ids monkey=banana tokenizer=gpt2 PWD=/root",
    "recipe.pip = tokenizers==0.20 secrets==1.0",
    "GOOGLE_APPLICATION_CREDENTIALS_FILE=/a/b TOKEN_PATH=/c",
    "password=$PASSWORD token=${TOKEN} secret=<secret>",
    "password=${A}:${B} secret=$(cat /run/a) api_key=${{ secrets.KEY }} token=%TOKEN% pw=%(pw)s passwd=${PW:?no} pw=$1",
    "cookie: a small file, which a browser keeps; see Cookie: and Set-Cookie: of RFC 6265",
    "the header Authorization: is missing; Authorization: required; authorization: basic",
    "no token: send 'Authorization: Bearer <token>'; curl -H \"Authorization: Basic <base64>\"",
    "Unexpected key: model.layers.0.weight, missing key: transformer_h_0_attn_weight of 0123456789abcdef",
    "step: 3, tokens: 512, token: unexpected, lr: 1 {pad_token: 3, mask_token: [MASK]}",
    'raise ValueError("token: must be a string")',
    "<pad> <token> </s> <key>sentence1</key> <token>512</token> a <b> c </b>",
    '{"name": "lr", "value": "0.1"} <add key="monkey" value="banana"/> name=token value=512',
    "step=1 loss=5.0 Basic training of bearers",
    'key="text of a column" token="4096" path="a b" sort_key: "loss, then step"',
]


@pytest.mark.parametrize(("text", "shown"), HIDES)
def test_secrets_are_hidden_wherever_they_stand(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(f"say {text}, now" if "\n" not in text and ": " not in text else text).count(HIDDEN) == 1


@pytest.mark.parametrize("text", STAYS)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


def test_a_secret_is_known_by_a_part_of_its_name() -> None:
    names = {"PGPASSWORD", "GITHUB_PAT", "MYSQL_PWD", "HF_TOKEN", "HFTOKEN", "wandbApiKey", "X-Amz-Signature", "KEYS"}
    names |= {"AWS_ACCESS_KEY_ID", "JWT2", "DB_PASSWD_1", "COOKIE", "SSH_PRIVATE_KEY", "--hub-token", "client_secret"}
    assert [name for name in names if not names_secret(name)] == []


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MONKEY", "PATH", "PWD", "PGPASSFILE", "author", "patience"]
)
def test_a_name_that_only_looks_like_it_is_none(name: str) -> None:
    assert not names_secret(name)


def test_of_a_command_line_what_stands_behind_a_flag_is_hidden_and_numbers_of_tokens_are_not() -> None:
    words = [
        "--password",
        "hunter2",
        "--max-tokens",
        "4096",
        "--text-key",
        "sentence1",
        "--token",
        "hunter2",
        "-v",
        "x",
    ]
    words += ["--api_key=hunter2", "db.password=hunter2", "s3://a:hunter2@b/c", "--auth", "0123456789abcdefX"]
    shown = redacted_json({"args": words})["args"]
    assert "hunter2" not in str(shown)
    assert "0123456789abcdefX" not in shown
    assert [word for word in shown if HIDDEN not in word] == [
        *("--password", "--max-tokens", "4096", "--text-key", "sentence1", "--token", "-v", "x", "--auth")
    ]


def test_a_mapping_is_hidden_by_its_names_and_in_its_values() -> None:
    found = redacted_json(
        {"env": {"PGPASSWORD": "a", "URL": "x://u:p@h", "tokens": "512", "N": 3}, "list": [{"pw": "b"}]}
    )
    assert found == {
        "env": {"PGPASSWORD": HIDDEN, "URL": "x://***@h", "tokens": "512", "N": 3},
        "list": [{"pw": HIDDEN}],
    }
    variables = [{"name": "PGPASSWORD", "value": "a"}, {"name": "N", "value": "b"}, {"key": "token", "value": 3}]
    assert redacted_json(variables) == [{"name": "PGPASSWORD", "value": HIDDEN}, *variables[1:]]
    assert list(hidden_in(found)) == ["env.PGPASSWORD", "env.URL", "list.0.pw"]
    shown = [text for _, text in HIDES if HIDDEN in text]
    assert [text for text in shown if not list(hidden_in(text)) and text not in AMIDST] == []
    assert list(hidden_in({"glob": "**/***.py", "a": "b = c"})) == []


@given(
    st.lists(
        st.sampled_from(
            [
                *("://", "@", ":", "/", "?", "=", "&", "token", "--", " ", "\n", "a", "pass", "Bearer ", '"', "ghp_"),
                *("Cookie: ", "Authorization: ", "Basic ", "Digest ", ";", "<token>", "</token>", "name=", "value="),
                *("$", "${", "}", "'"),
            ]
        )
    )
)
def test_what_was_hidden_stays_hidden_and_changes_no_more(parts: list[str]) -> None:
    once = redacted("".join(parts))
    assert redacted(once) == once


@pytest.mark.slow
def test_no_text_takes_long() -> None:
    """A regular expression that goes back and forth would need minutes for one of these."""
    for part in (
        "://",
        "a://",
        "eyJ",
        "-----BEGIN PRIVATE KEY",
        "a=",
        "--token ",
        "ghp_",
        "a",
        "@:",
        "?a",
        "x.",
        "key: ",
        'token="1 ',
        "token='1",
        "cookie: a=",
        "cookie: a=b;",
        "authorization: basic ",
        "authorization: digest ",
        "<token>",
        "<token ",
        "name=token value=",
        "'token: a",
        "token=$a",
        "token=${a:?",
        "token=%a",
        "token=$a$",
        "{token: ",
        ",token: a",
        "- token: a\n",
        "'token', 'a1",
        " token: a1",
    ):
        text = "token " + part * ((1 << 18) // len(part))
        began = time.process_time()
        redacted(text)
        assert time.process_time() - began < 5.0, part


def test_a_log_has_no_secrets_whatever_was_written_into_it() -> None:
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "open %s", ("s3://k:hunter2@b/c",), None)
    assert Redacting("%(message)s").format(record) == "open s3://***@b/c"
