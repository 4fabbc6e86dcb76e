"""Which replicas a commit bars from dealing, by what the check records that it names say of published averages."""

from diloco_orchestrator.protocol.check_records import AverageCheck, Checked, PublishedAverage, barred_after

B3 = "b3:" + "0" * 64
PAIR = PublishedAverage(round=2, shard=5, replicas=(1, 2), digest=B3)


def said(replica_id: int, false: bool, average: PublishedAverage = PAIR) -> Checked:
    return Checked(
        write_id="w",
        at=0.0,
        round=3,
        leg=1,
        replica_id=replica_id,
        attempt=1,
        number=1,
        claim_sha256="0" * 64,
        read=(),
        averages=(AverageCheck(average=average, false=false),),
    )


def test_who_most_others_accuse_is_barred_and_a_minority_bars_nobody_but_itself():
    everyone = range(5)
    accused = [said(i, True) for i in (0, 3, 4)]
    denied = [said(i, False) for i in (1, 2)]
    assert barred_after((), everyone, accused + denied) == (1, 2)
    assert barred_after((), everyone, accused[:2] + denied) == ()
    assert barred_after((), everyone, [*accused[:2], *[said(i, False) for i in (1, 2, 4)]]) == (0, 3)
    assert barred_after((), range(4), [said(0, True), said(3, True), *denied]) == ()  # two of four are not most


def test_who_is_barred_has_no_say_and_stays_barred():
    lone = PAIR.model_copy(update={"replicas": (0,)})
    assert barred_after((1, 2), range(5), [said(i, True, lone) for i in (1, 2, 3)]) == (1, 2)
    assert barred_after((1, 2), range(5), [said(i, True, lone) for i in (3, 4)]) == (0, 1, 2)
    assert barred_after((1,), (), []) == (1,)


def test_a_replica_that_repeats_an_accusation_counts_once_and_others_of_another_average_not_at_all():
    other = PAIR.model_copy(update={"shard": 6})
    assert barred_after((), range(5), [said(0, True)] * 3) == ()
    assert barred_after((), range(5), [said(0, True), said(3, True, other), said(4, True)]) == ()


def test_a_check_record_without_averages_has_the_bytes_of_earlier_versions():
    plain = said(0, True).model_copy(update={"averages": None})
    assert b"averages" not in plain.to_bytes() and Checked.from_bytes(plain.to_bytes(), "k") == plain
    full = said(0, True)
    assert Checked.from_bytes(full.to_bytes(), "k") == full
    average = '{"digest":"' + B3 + '","replicas":[1,2],"round":2,"shard":5}'
    assert f'"averages":[{{"average":{average},"false":true}}]'.encode() in full.to_bytes()
