"""Records: pinned bytes, strict parsing, and words for whoever meets a foreign one."""

import json

import pytest
from record_examples import B3, EXAMPLES, SHA

from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import RecordInvalid, RecordTooNew, RecordTooOld
from diloco_orchestrator.protocol import (
    allreduce_records,
    attempt_records,
    check_records,
    key_records,
    records,
    start_records,
)
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.record_format import Record, Stamp

# Changing one of these changes what is in buckets already: raise SCHEMA_VERSION, and name the version that reads the
# old form in `record_format`.
GOLDEN = {
    "run": "2ab1201f0b563ee1b75958f04d9afe9188543f5661b2cd164cb4064b208514f6",
    "start": "d2db0d5588e2a1cd8291e98216cd05ad4dcb650d98de33bb37e3f0b597f17473",
    "began": "ed9ab3c189183978f717126ab98fbc2f5f353fe6d3df6d0e797721781d3c9c92",
    "link": "e88c1b8c914916e4ccaa8e89d473a9f45df03a3a861cc1af6f5d62106a988650",
    "follows": "def2cc8a1c41782004e9f40be557960266ceb7049d801e97b6d39fe6a9346a78",
    "begin": "90902d8fbbf4b8a12adc1d72ba36a745c4caa7636a9673ff617f20d6e88f2a02",
    "halt": "5c2f01748a2e3f5210649a14acff31383f76dc4f1dd151d2c662c71bb9ca2afc",
    "scale": "da7b7bd24cb7f68ffd415491baa5b1ece2b28cc1f289fc2a96a4961ecec5970d",
    "out": "3518c073d295cb63793c81093c6993fbec18c1b2a2e327f6c6975a700f8a2c24",
    "result": "36759ce0b209edb67e620b428116187167feab2419e59bf2adba51359f301ce2",
    "intent": "788464daecfa732df6d56baf18c547e2fca172b10b0f28df4cf429ee03cb68b0",
    "handle": "a83e8a56efef10bf21cb812c9be54557dc022f095b328f690f73b5509ad6b2b1",
    "waiting": "60a5adba0b358d577969e861149c3036908853f447a4e24a3f92f34eb03fb240",
    "claim": "2886bf4e0cc211b8b9415e105876a801c4a0a9f30e9ac66aefef86b51cdfa2e1",
    "cancel": "703950ea76374e9fafe3ca4077a5a6a9ba872d34ccaab8a8b4b1e6d5f4405cfc",
    "exit": "3effdbee3c8da206482d477eeb89226c8eafd452fdd70fa2a4aae1452efb9825",
    "heartbeat": "f6ba7a2718840313e1dee11c8065cc6430e3183a77fd32a65303312cfdd97e00",
    "contribution": "df14c3143a0c99fd030a09691f923563de58f9a485371c5cab3e706df415c6cf",
    "checked": "0dcd3f403ca44c64f6ba8b2dd2530aefdce8bd48b2916be29d065739bc451bfc",
    "commit": "e65014ad9814c234a8b7a5ff5a58b86787b65fb2e0ef444b6d5036cdbdae0266",
    "offer": "a2fe753385222c5a7fc38c9d59866c47b61044d2a4f904ea0a7b80c0d790154c",
    "invitation": "f227a9518f47d6a664a234f91412d59b578927dcbcf714d9954738e88a4c4b90",
    "grant": "ce42df6d0597619202aae93d6b9fb4f68c1659b1bc4a227053008943b70a2ede",
    "window": "e1f411cf5f6c859edabf7463f6a5757490697049afb89c6fa666d62f8d9ec75b",
    "taken": "4b647553a718d3569d28d248867717741f6117f543d42a14a07a66661fa23b42",
    "lease": "ba090ff8db0e700a5d715a791e21e92c2482ed62b00c2d135d3417b90027525a",
    "join_cancel": "19b89fa68632f742ab1bbf79e5c8d6a089bca758bf13592cb21dda7717f17f5b",
    "join_end": "e66ea266fa93af23b3d960dc328fc80733eb7f55b73c14632aa0a36b75b2dc46",
    "snapshot": "db73bceabcc1c909e4f7e23bfdd73f0f6ab4f2c9d755d8b95f09d9197f2b7f2e",
    "probe": "a1cef11d73bf83a7e362bc885a28ac5f8be29776ecffb6c3c12cf371a07946f0",
    "unfounded": "fe24a2b544566370f978c41be6c1ed2dc94c48d9e37e45413c255ebaea2b9cdf",
    "want": "f9ee1049ee33783419197ef25083142df50be7d8b7aea8a6dd784f3ff670a9fa",
    "retention": "6a8370582ab6582c223cd6da40a59822e7aeab103ecf88908362d34d5ec152e6",
    "rotation": "b80ab1b22679e436db0e63447c675dc61ced99920b988b3e56d1f7fbbcbbc1ad",
    "colleague": "eb2f93d2e2bd54ae9924c621001b9a2281f544e2de60b9a24a2720c997d98333",
    "reduced": "31d24674ed71273307539f6631e5d2dbdfbfc3e1e1993ab93078359f3d76277e",
    "allreduce": "54dddff3a037fe21eb1f9ecdb730ec731f74d30c0c71c66970d49daa3a1b34ef",
}


def every_record() -> list[type[Record]]:
    modules = records, attempt_records, allreduce_records, check_records, key_records, start_records
    schemas = {name: kind for module in modules for name, kind in vars(module).items()}.values()
    found = [kind for kind in schemas if isinstance(kind, type) and issubclass(kind, Record)]
    return [kind for kind in found if kind is not Record]


def test_every_record_has_an_example_and_golden_bytes():
    names = sorted(kind.record for kind in every_record())
    assert names == sorted(EXAMPLES) == sorted(GOLDEN)


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes(name: str):
    assert sha256_hex(EXAMPLES[name].to_bytes()) == GOLDEN[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_records_come_back_equal(name: str):
    example = EXAMPLES[name]
    assert type(example).from_bytes(example.to_bytes(), "here") == example


def test_bytes_are_one_line_of_sorted_json():
    data = EXAMPLES["halt"].to_bytes()
    assert data == (
        b'{"at":1700000000.5,"by":"user","leg":1,"reason":"enough","record":"halt","schema_version":2,'
        b'"write_id":"0123456789abcdef-1"}\n'
    )


@pytest.mark.parametrize("digest", [SHA, "b3:" + SHA[:-2], "b3:" + SHA.upper(), f"{B3}\n", ""])
@pytest.mark.parametrize("name", ["snapshot", "allreduce"])
def test_a_digest_of_bulk_bytes_that_does_not_say_that_it_is_blake3_is_refused(name: str, digest: str):
    data = EXAMPLES[name].to_bytes().replace(json.dumps(B3).encode(), json.dumps(digest).encode())
    with pytest.raises(RecordInvalid, match="should match pattern"):
        type(EXAMPLES[name]).from_bytes(data, "here")


def halt_with(**changes: object) -> bytes:
    body = json.loads(EXAMPLES["halt"].to_bytes())
    return json.dumps({**body, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe", "legs/1/halt.json is not JSON"),
        (b"", "not JSON"),
        (b'{"record":"halt"', "not JSON"),
        (b"[]", "holds a JSON list, not an object"),
        (halt_with(record="commit"), "named 'commit', not 'halt'"),
        (halt_with(schema_version=0), "schema version 0"),
        (halt_with(schema_version="1"), "schema version '1'"),
        (halt_with(leg="1"), "field 'leg' of this halt record is wrong"),
        (halt_with(leg=0), "field 'leg'"),
        (halt_with(extra=1), "field 'extra'"),
        (halt_with(at=float("nan")), "the number NaN"),
    ],
)
def test_anything_odd_is_refused_by_name(data: bytes, words: str):
    with pytest.raises(RecordInvalid, match=words):
        records.Halt.from_bytes(data, "legs/1/halt.json")


def test_a_codec_of_another_version_is_refused_with_that_version():
    body = json.loads(EXAMPLES["run"].to_bytes())
    config = {**body["config"], "codec": "int3"}
    words = (
        r"unknown codec 'int3': did you mean .*\. diloco-orchestrator 9\.9 wrote it, and this is .*read the run with"
    )
    with pytest.raises(RecordInvalid, match=words):
        records.Run.from_bytes(json.dumps({**body, "config": config, "package_version": "9.9"}).encode(), "run.json")


def test_a_newer_schema_is_refused_with_the_remedy():
    with pytest.raises(
        RecordTooNew,
        match=r"legs/1/halt\.json has schema version 3.*Upgrade diloco-orchestrator to the version that wrote it",
    ):
        records.Halt.from_bytes(halt_with(schema_version=3, unheard_of=True), "legs/1/halt.json")


@pytest.mark.parametrize("kind", every_record(), ids=lambda kind: kind.record)
def test_an_older_schema_is_refused_with_the_version_that_reads_it(kind: type[Record]):
    body = json.loads(EXAMPLES[kind.record].to_bytes())
    words = r"it\.json has schema version 1; this package reads version 2 only\. diloco-orchestrator 0\.2\.x reads it"
    with pytest.raises(RecordTooOld, match=words):
        kind.from_bytes(json.dumps({**body, "schema_version": 1}).encode(), "it.json")


def test_two_writes_of_one_process_differ():
    stamp = Stamp("token", lambda: 1.0)
    assert [stamp()["write_id"] for _ in range(2)] == ["token-1", "token-2"]


@pytest.mark.parametrize("run_id", ["../../../x", "a/b", "", ".", "..", "x\n", "<script>", "a" * 101, "é", "-x"])
def test_a_run_id_is_a_name_that_can_stand_in_a_path_and_in_a_page(run_id: str):
    run = records.Run(
        write_id="w", at=0.0, run_id="run-1", config=make_config({"entrypoint": "m:f"}), package_version="0"
    )
    data = run.to_bytes().replace(b'"run_id":"run-1"', b'"run_id":' + json.dumps(run_id, ensure_ascii=False).encode())
    assert data != run.to_bytes()
    with pytest.raises(RecordInvalid, match="run_id"):
        records.Run.from_bytes(data, "run.json")
