"""The planted faults of `make mutants`: where each is planted, which claim it breaks, which tests must notice.

Only data; `run.py` plants them. `before` must occur exactly once in its file, so a mutant that the code has outgrown
is reported instead of passing unnoticed. `tests` is the narrowest set expected to notice: a mutant takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

# Tests by what they exercise; a renamed test file is renamed here once.
ROUND_RULES = "tests/protocol/test_rounds.py"
CLAIM_RULES = "tests/protocol/test_claims.py"
WEIGHT_RULES = "tests/protocol/test_weights.py"
FLIPS = "tests/simulation/test_flipped_bits.py -m slow"
RECORDS = "tests/protocol/test_records.py"
CODECS = "tests/protocol/test_codecs.py"
REDACTION = "tests/protocol/test_errors.py"
MEAN = "tests/allreduce/test_mean.py"
ALLREDUCE = "tests/allreduce/test_object_store.py"
OUTER_STEP = "tests/outer/test_outer_step.py"
SNAPSHOTS = "tests/snapshots/test_layout.py"
SHARDS = "tests/snapshots/test_shards.py"
FIRST_BASE = "tests/replica/test_first_base.py"
SAVED_STATE = "tests/replica/test_saved_state.py"
MULTIPART = "tests/store/test_multipart.py"
CONFIRMATION = "tests/snapshots/test_confirmation.py"
PARTICIPANT = "tests/replica/test_participant.py"
ELASTIC = "tests/replica/test_elastic.py"
INTEGRITY = "tests/replica/test_round_integrity.py"
GUARD_CLAIMS = "tests/guard/test_claims.py"
CARRY = "tests/replica/test_carry.py"
PARTS = "tests/replica/test_rounds_parts.py"
WANT = "tests/replica/test_want.py"
CACHE = "tests/allreduce/test_payload_cache.py"
MAPPED = "tests/allreduce/test_mapped_files.py"
SPOOL = "tests/allreduce/test_spool.py"
RUN_LOG = "tests/run_log/test_run_log.py"
PARALLEL = "tests/protocol/test_in_parallel.py"
ROUND_TRIPS = "tests/replica/test_round_trips.py"
RESTART = "tests/replica/test_restart.py"
TIMING = "tests/replica/test_timing.py"
SESSION = "tests/replica/test_context.py"
EXACT_RESUME = "tests/replica/test_exact_resume.py"
FLEET_CLAIMS = "tests/replica/test_fleet_claims.py"
RETENTION_CLAIMS = "tests/supervision/test_retention_claims.py"
COORDINATOR_CLAIMS = "tests/supervision/test_coordinator_claims.py"
VERIFY_CLAIMS = "tests/inspection/test_verify_claims.py"
STRAGGLER = "tests/protocol/test_straggler.py"
ATTEMPT = "tests/supervision/test_attempt.py"
MONEY = "tests/inspection/test_costs.py"
RECOVERY = "tests/supervision/test_recovery.py"
LOOP = "tests/replica/test_diloco_loop.py"
RESUME = "tests/replica/test_resume.py"
FOLD = "tests/guard/test_fold.py"
HELDOUT = "tests/guard/test_heldout.py"
SHARES = "tests/guard/test_shares.py"
SPLIT = "tests/split/test_split.py"
CONSUMED = "tests/replica/test_consumed_items.py"
DRIFT = "tests/replica/test_probe.py"
FLEET = "tests/supervision/test_fleet_policy.py"
LEGS = "tests/supervision/test_legs.py"
NEXT_LEG = "tests/supervision/test_next_leg_settings.py"
PER_REPLICA = "tests/guard/test_per_replica.py"
COORDINATOR = "tests/supervision/test_coordinator.py"
RETENTION = "tests/supervision/test_retention.py"
SEGMENTS = "tests/run_log/test_segments.py"
CATCHING_UP = "tests/replica/test_catching_up.py"
VERIFY = "tests/inspection/test_verify.py"
RETRYING = "tests/store/test_retrying.py"
STORES = "tests/store/test_contract.py"
PROBE = "tests/store/test_probe.py"
S3 = "tests/store/test_s3.py"
PACK = "tests/code_archive/test_pack.py"
ARRIVAL = "tests/code_archive/test_arrival.py"


@dataclass(frozen=True)
class Mutant:
    """One fault. `equivalent`: why no behaviour differs, for a mutant that nothing can notice; it is not counted."""

    name: str
    file: str
    before: str
    after: str
    claim: str  # what it breaks
    tests: tuple[str, ...]
    equivalent: str = ""


Row = Callable[[str], Mutant]  # a mutant that does not know its file yet


def _row(name: str, before: str, after: str, claim: str, *tests: str, equivalent: str = "") -> Row:
    return lambda file: Mutant(name, file, before, after, claim, tests, equivalent)


def _in(file: str, *rows: Row) -> list[Mutant]:
    return [row(file) for row in rows]


MUTANTS: list[Mutant] = [
    *_in(
        "diloco_orchestrator/protocol/rounds.py",
        _row(
            "abstentions count towards the quorum",
            "for a in view.answers if contributes(a)))",
            "for a in view.answers))",
            "a commit never averages fewer contributions than the quorum (I1)",
            ROUND_RULES,
        ),
        _row(
            "a round waits for who is off the roster",
            "awaited = tuple(sorted(set(view.roster) - answered))",
            "awaited = missing",
            "a dead replica costs one straggler deadline, once",
            ROUND_RULES,
        ),
        _row(
            "no grace after a late quorum",
            "return max(view.opened_at + deadline_s, quorum_since + grace_s) - now",
            "return view.opened_at + deadline_s - now",
            "stragglers are given a grace from the moment the quorum is there",
            ROUND_RULES,
        ),
        _row(
            "the straggler deadline runs from this replica's own answer",
            "return max(view.opened_at + deadline_s, quorum_since + grace_s) - now",
            "return max(view.waiting_since + deadline_s, quorum_since + grace_s) - now",
            "the straggler deadline is counted from the opening of the round",
            ROUND_RULES,
        ),
        _row(
            "the first round waits for round_timeout_s",
            "else policy.startup_timeout_s\n    if len(contributors)",
            "else policy.round_timeout_s\n    if len(contributors)",
            "a leg's first round waits for everybody for startup_timeout_s",
            ROUND_RULES,
        ),
        _row(
            "quorum all ends a round with nobody at three deadlines",
            "(not policy.strict and len(answered)",
            "(len(answered)",
            "with quorum all every round waits for every replica",
            ROUND_RULES,
            equivalent="with quorum all the quorum is everybody, and when everybody has responded the first half of the condition holds",
        ),
        _row(
            "a round without quorum ends with nobody before its deadlines",
            "and now - view.opened_at >= enough_s):",
            "):",
            "responses end a round for nobody only after three straggler deadlines",
            ROUND_RULES,
        ),
        _row(
            "training time counts as time without quorum",
            "left = max(view.waiting_since + policy.round_timeout_s, ends_at) - now",
            "left = max(view.opened_at + policy.round_timeout_s, ends_at) - now",
            "round_timeout_s is counted from this replica's answer",
            ROUND_RULES,
        ),
        _row(
            "a long round is given up before its deadlines",
            "left = max(view.waiting_since + policy.round_timeout_s, ends_at) - now",
            "left = view.waiting_since + policy.round_timeout_s - now",
            "a round that may still end for its stragglers is not given up",
            ROUND_RULES,
        ),
        _row(
            "carried work counts half per staleness",
            "_STALENESS = 0.25",
            "_STALENESS = 0.5",
            "carried work weighs 1 / (1 + staleness / 4)",
            ROUND_RULES,
        ),
        _row(
            "a halted round is applied after a verdict",
            "applied = bool(decision.named) and not closing and not fired",
            "applied = bool(decision.named) and not closing",
            "a round whose verdict fired is never applied (I7)",
            ROUND_RULES,
        ),
        _row(
            "the closing round is applied",
            "applied = bool(decision.named) and not closing and not fired",
            "applied = bool(decision.named) and not fired",
            "the closing round carries scores and moves nothing",
            ROUND_RULES,
        ),
        _row(
            "a halt hides a verdict",
            ('    if fired:\n        return "halted", f"the guard fired: {fired}"'),
            ('    if fired and not halt:\n        return "halted", f"the guard fired: {fired}"'),
            "the verdict goes before a requested halt",
            ROUND_RULES,
        ),
        _row(
            "a halt hides the completion",
            "    if closing and decision.named:",
            "    if closing and decision.named and not halt:",
            "a run whose steps are taken completes although a halt is requested",
            ROUND_RULES,
        ),
        _row(
            "empty rounds add up over good ones",
            "empty = 0 if decision.named else position.empty_rounds + 1",
            "empty = position.empty_rounds if decision.named else position.empty_rounds + 1",
            "only rounds in a row that name nobody fail the run",
            ROUND_RULES,
        ),
        _row(
            "a fourth empty round is needed",
            "if empty >= MAX_EMPTY_ROUNDS:",
            "if empty > MAX_EMPTY_ROUNDS:",
            "three empty rounds in a row stop the run as failed",
            ROUND_RULES,
        ),
        _row(
            "one outer step too many",
            "return position.outer_step >= outer_steps",
            "return position.outer_step > outer_steps",
            "the closing round comes after the last outer step",
            ROUND_RULES,
        ),
        _row(
            "latecomers stay off the roster",
            "roster = tuple(sorted({*answered, *latecomers}))",
            "roster = tuple(sorted({*answered}))",
            "who answered the round before too late is waited for again",
            ROUND_RULES,
        ),
        _row(
            "a roster below the quorum",
            "if policy.strict or len(roster) < policy.quorum:",
            "if policy.strict:",
            "a roster smaller than the quorum becomes everybody",
            ROUND_RULES,
        ),
        _row(
            "quorum all follows the roster",
            "if policy.strict or len(roster) < policy.quorum:",
            "if len(roster) < policy.quorum:",
            "with quorum all everybody is always on the roster",
            ROUND_RULES,
        ),
        _row(
            "a commit says that everybody is averaged",
            'update={"averaged": answer.replica_id in averaged}',
            'update={"averaged": True}',
            "a commit says who is in the average",
            ROUND_RULES,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/straggler.py",
        _row(
            "no slack beyond the spread",
            "_LEAST_SLACK = 0.5 ",
            "_LEAST_SLACK = 0.0 ",
            "the deadline leaves at least half of the median as slack",
            STRAGGLER,
        ),
        _row(
            "slack without an upper bound",
            "_LEAST_SLACK_S, _MOST_SLACK_S = 2.0, 600.0",
            "_LEAST_SLACK_S, _MOST_SLACK_S = 2.0, 1e9",
            "the slack is at most ten minutes",
            STRAGGLER,
        ),
        _row(
            "one deviation of slack",
            "_MADS = 4.0",
            "_MADS = 1.0",
            "the deadline leaves four median absolute deviations",
            STRAGGLER,
        ),
        _row(
            "grace without an upper bound",
            "_MOST_GRACE_S = 60.0",
            "_MOST_GRACE_S = 1e9",
            "the grace is at most a minute",
            STRAGGLER,
        ),
        _row(
            "a cut contribution tells a short round",
            "= source.train_s * whole",
            "= source.train_s",
            "the time of a partial round is scaled up to a whole one",
            STRAGGLER,
        ),
        _row(
            "abstentions tell how long a round takes",
            'if source.kind == "delta" and steps:',
            'if steps or source.kind == "abstention":',
            "only work tells how long a round takes",
            STRAGGLER,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/legs.py",
        _row(
            "latest instead of earliest base on a tie",
            "key=lambda pair: (pair[0], -pair[1])",
            "key=lambda pair: (pair[0], pair[1])",
            "of bases with equal scores the earliest counts as the best",
            LEGS,
        ),
        _row(
            "the score counts for the base after its round",
            (
                "        if value is not None:\n"
                "            self._scores[self._base] = max(value, self._scores.get(self._base, value))\n"
                "        self._base = commit.round if commit.applied else self._base\n"
            ),
            (
                "        self._base = commit.round if commit.applied else self._base\n"
                "        if value is not None:\n"
                "            self._scores[self._base] = max(value, self._scores.get(self._base, value))\n"
            ),
            "a commit carries the score of the base before its round",
            LEGS,
        ),
        _row(
            "a new leg's first score counts for the old leg's last base",
            "self._leg, self._base = commit.leg, begin.from_round",
            "self._leg = commit.leg",
            "the first score of a leg is of the base that the leg started from",
            LEGS,
        ),
        _row(
            "bases left behind by a resume count",
            ("        if round_ > begin.from_round:\n            return None"),
            ("        if round_ > begin.from_round:\n            continue"),
            "no later base descends from rounds that a resume left behind",
            LEGS,
        ),
        _row(
            "empty rounds survive into the next leg",
            'begin.from_outer_step, empty_rounds=0, stop="none"',
            'begin.from_outer_step, empty_rounds=2, stop="none"',
            "a leg begins with no empty round behind it",
            LEGS,
        ),
        _row(
            "any round can be resumed from",
            ("    if round_ not in among:\n        nearest"),
            ("    if False:\n        nearest"),
            "a round without a base is refused, the nearest one offered",
            LEGS,
        ),
    ),
    *_in(
        "diloco_orchestrator/run_log/checked_segments.py",
        _row(
            "a segment's last commit is believed",
            "                self._check_last(lines[-1][0])\n",
            "",
            "the commit after a segment must name its last one",
            SEGMENTS,
        ),
        _row(
            "a bad segment ends the reading",
            "                self._on_bad_segment(str(segment), str(error))\n                continue",
            "                self._on_bad_segment(str(segment), str(error))\n                raise",
            "single commits are read where a segment disagrees",
            SEGMENTS,
        ),
    ),
    *_in(
        "diloco_orchestrator/run_log/segments.py",
        _row(
            "a segment's chain is not checked",
            "            check_link(entry, before)\n",
            "",
            "a changed commit within a segment is refused",
            SEGMENTS,
        ),
        _row(
            "a truncated segment is believed",
            "        if len(lines) != segment.last - segment.first + 1:\n",
            "        if False:\n",
            "a segment holds as many lines as it has rounds",
            SEGMENTS,
        ),
    ),
    *_in(
        "diloco_orchestrator/inspection/verify/segments.py",
        _row(
            "verify believes that single objects exist",
            "        if found != size:\n",
            "        if False:\n",
            "verify reports a single commit or manifest that is missing or of another size",
            SEGMENTS,
        ),
        _row(
            "verify believes a segment of manifests",
            "        if ours is not None and is_line(data) and data not in ours:\n",
            "        if False:\n",
            "verify names a segment that lacks a manifest",
            SEGMENTS,
        ),
    ),
    *_in(
        "replica/rounds/contribution_history.py",
        _row(
            "old manifests are not looked for",
            "        return self._attempt.replica_id in self._listing.authors(round_)\n",
            "        return False\n",
            "a replica finds its last manifest many rounds back",
            CATCHING_UP,
        ),
        _row(
            "a first attempt looks for earlier manifests",
            "self._is_alone = claims == {self._attempt.number}",
            "self._is_alone = False",
            "a first join costs the same after any number of rounds",
            CATCHING_UP,
        ),
        _row(
            "the first attempt is taken for the first to run",
            "self._is_alone = claims == {self._attempt.number}",
            "self._is_alone = self._attempt.number == 1",
            "an attempt that starts after its successor finds what that published",
            CATCHING_UP,
        ),
    ),
    *_in(
        "diloco_orchestrator/run_log/run_log.py",
        _row(
            "a replica far behind follows every round",
            "        if round_ <= self._open_seen or self.commit(far) is None:\n",
            "        if True:\n",
            "a replica far behind goes on from the newest snapshot",
            CATCHING_UP,
        ),
        _row(
            "a commit copied from another round",
            "if commit.round != round_:",
            "if False:",
            "a commit under another round's key is refused",
            INTEGRITY,
        ),
        _row(
            "the log is read without checking its links",
            ("            check_link(entry, position)\n            if self._newest"),
            "            if self._newest",
            "a changed commit breaks the chain for every reader",
            PARTICIPANT,
        ),
        _row(
            "the first leg is taken for the newest",
            "return self._existing_begin(max(1, self.newest_leg()))",
            "return self._existing_begin(1)",
            "a reader finds the newest leg",
            ELASTIC,
        ),
        _row(
            "absence is remembered",
            (
                "        data = self._fetch(key)\n"
                "        return None if data is None else self.remember(kind, key, data)\n"
            ),
            (
                "        data = self._fetch(key) if not hasattr(self, 'gone' + key) else None\n"
                "        if data is None:\n"
                "            setattr(self, 'gone' + key, 1)\n"
                "        return None if data is None else self.remember(kind, key, data)\n"
            ),
            "absence is asked for again: a halt that comes later is seen",
            PARTICIPANT,
        ),
    ),
    *_in(
        "diloco_orchestrator/run_log/attempts.py",
        _row(
            "an intent supersedes a living attempt",
            "for key in parsed if key and key.name == keys.CLAIM}",
            "for key in parsed if key}",
            "only a process that has claimed a later attempt supersedes an earlier one",
            INTEGRITY,
        ),
        _row(
            "the first heartbeat is kept",
            (
                "        data = read_optional(self._store, key)\n"
                "        return None if data is None else Heartbeat.from_bytes(data, key)"
            ),
            "        return self._read(Heartbeat, key)",
            "heartbeats are fetched every time",
            COORDINATOR,
        ),
    ),
    *_in(
        "diloco_orchestrator/clock.py",
        _row(
            "the error that came first is raised",
            "raise errors[min(errors)]",
            "raise next(iter(errors.values()))",
            "of parallel calls the first error in their order is raised, whatever the timing",
            PARALLEL,
        ),
        _row(
            "parallel calls go on after an error",
            "            while not errors:",
            "            while True:",
            "after an error no further parallel call begins",
            PARALLEL,
        ),
        _row(
            "one more call than is allowed runs at once",
            "for _ in range(min(most, len(calls)) - 1)]",
            "for _ in range(min(most, len(calls)))]",
            "no more parallel calls run at once than are allowed",
            PARALLEL,
        ),
    ),
    *_in(
        "diloco_orchestrator/run_log/contributions.py",
        _row(
            "a manifest is followed whatever its digest",
            "if sha256_hex(data) != answer.manifest_sha256:",
            "if False:",
            "a manifest that is not the one the commit names is refused",
            INTEGRITY,
        ),
        _row(
            "one unreadable manifest hides the round's others",
            (
                "        with suppress(RecordInvalid):  # the same as no manifest: the round does not wait for its author\n"
                "            return"
            ),
            ("        if True:\n            return"),
            "a manifest that cannot be read stops nobody",
            INTEGRITY,
        ),
    ),
    *_in(
        "diloco_orchestrator/run_log/append.py",
        _row(
            "the last commit wins",
            "if without_read_back(log.store).create(keys.commit(commit.round), data):",
            "if log.store.put(keys.commit(commit.round), data) is None:",
            "at most one commit per round, ever (I1)",
            "tests/run_log/test_run_log.py",
        ),
        _row(
            "another configuration joins the run",
            "if not created and log.run.config != run.config:",
            "if False:",
            "a replica that joins with other settings is refused",
            PARTICIPANT,
        ),
        _row(
            "a second run takes a folder over",
            "    if not store.create(keys.RUN, data):",
            "    if store.create(keys.RUN, data) is None:",
            "a folder that holds a run is refused to a second one",
            RUN_LOG,
        ),
        _row(
            "an ended leg is halted",
            "if (result := log.result(leg)) is not None:",
            "if (result := log.result(leg)) is not None and False:",
            "there is nothing to halt in a leg that has ended",
            LEGS,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/record_format.py",
        _row(
            "later schemas are read as this one",
            "if version > SCHEMA_VERSION:",
            "if False:",
            "a record of a later schema is refused with a word about the upgrade",
            RECORDS,
        ),
        _row(
            "any record passes for any other",
            "if name != cls.record:",
            "if False:",
            "a record under another record's key is refused",
            RECORDS,
        ),
        _row(
            "unknown fields are ignored",
            'extra="forbid", strict=True, allow_inf_nan=False)',
            'extra="ignore", strict=True, allow_inf_nan=False)',
            "a record with an unknown field is refused",
            RECORDS,
        ),
        _row(
            "records take NaN",
            'extra="forbid", strict=True, allow_inf_nan=False)',
            'extra="forbid", strict=True, allow_inf_nan=True)',
            "no number in a record is NaN or infinite",
            RECORDS,
        ),
        _row(
            "two records of one process share a write id",
            ("        self._count += 1\n"),
            ("        self._count = 1\n"),
            "every write has a write id of its own",
            RECORDS,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/codecs.py",
        _row(
            "bytes behind the payload are ignored",
            " or len(data) != found.encoded_size(numel):",
            " or len(data) < found.encoded_size(numel):",
            "a payload is exactly as long as its manifest says",
            CODECS,
        ),
        _row(
            "the payload's header is ignored",
            "if data[: _HEADER.size] != expected or len(data)",
            "if len(data)",
            "bytes of another codec, version or length are refused",
            CODECS,
        ),
        _row(
            "bf16 is cut instead of rounded",
            "return flat.to(torch.bfloat16).view(torch.int16).numpy()",
            "return (flat.view(torch.int32) >> 16).to(torch.int16).numpy()",
            "bf16 rounds to the nearest value",
            CODECS,
        ),
    ),
    *_in(
        "diloco_orchestrator/allreduce/shards.py",
        _row(
            "payload digests are not checked",
            "if digest == shard.digest:",
            "if len(data) == shard.size:",
            "payload bytes that do not match their digest are never averaged (I6)",
            PARTICIPANT,
        ),
        _row(
            "a flipped bit on the way costs the contribution",
            "_READS = 2 ",
            "_READS = 1 ",
            "a digest that does not match is read once more",
            ALLREDUCE,
        ),
        _row(
            "finiteness is not checked",
            "if count := codecs.count_nonfinite(data, payload.codec, stop - start):",
            "if count := 0 * codecs.count_nonfinite(data, payload.codec, stop - start):",
            "NaN and infinity are never averaged, whoever wrote them (I6)",
            INTEGRITY,
        ),
        _row(
            "foreign bytes of the right digest are believed",
            '    check_shard(data, payload, index, f"{key} in {store.url}")\n',
            "",
            "codec, length and finiteness are checked where bytes arrive, because the mean checks them no more (I6)",
            INTEGRITY,
        ),
        _row(
            "a file of other bytes is averaged where it lies",
            "        if bulk_digest(data) != shard.digest:\n",
            "        if False:\n",
            "payload bytes that do not match their digest are never averaged (I6), in a folder either",
            MAPPED,
        ),
        _row(
            "a file of numbers that are not finite is averaged where it lies",
            'check_shard(data, payload, index, f"the file {key} in {store.url}")',
            "pass",
            "NaN and infinity are never averaged, whoever wrote them (I6), in a folder either",
            MAPPED,
        ),
        _row(
            "every shard but the first is lost",
            "range(0, numel, shard_numel)]",
            "range(0, min(numel, shard_numel), shard_numel)]",
            "a vector of several shards travels whole",
            ELASTIC,
        ),
    ),
    *_in(
        "diloco_orchestrator/allreduce/payload.py",
        _row(
            "finiteness is checked before the codec rounds",
            "            nonfinite += count\n",
            "            nonfinite = int((~vector.read(start, stop).isfinite()).sum())\n",
            "a number that bf16 turns into infinity is not published",
            ALLREDUCE,
        ),
        _row(
            "shards before the one that is not finite are published",
            "        cache.put((key_of_shard(index), shard.digest), whole.getvalue())\n",
            (
                "        cache.put((key_of_shard(index), shard.digest), whole.getvalue())\n"
                "        _create_same(store, key_of_shard(index), whole.getvalue())\n"
            ),
            "a vector that is not finite is refused before anything is written",
            ALLREDUCE,
        ),
        _row(
            "other bytes under a payload's key are accepted",
            "if not store.create(key, data) and store.get(key) != data:",
            "if not store.create(key, data) and False:",
            "a round id that was used for other numbers is refused",
            PARTICIPANT,
        ),
        _row(
            "a payload of another shape is accepted",
            ('    if found != expected:\n        raise PayloadCorrupt(\n            f"the payload is'),
            ('    if False:\n        raise PayloadCorrupt(\n            f"the payload is'),
            "a payload of other elements, codec or shards is never averaged",
            PARTICIPANT,
        ),
    ),
    *_in(
        "diloco_orchestrator/allreduce/spool.py",
        _row(
            "disk space for held tensors is not reserved",
            "os.posix_fallocate(file.fileno(), start, nbytes)",
            "file.truncate(start + nbytes)",
            "a full disk is an error of the allocation, not a signal when the tensor is written",
            SPOOL,
        ),
        _row(
            "memory that was held is never given back",
            "self._used -= nbytes",
            "pass",
            "what is dropped gives its memory back to the budget",
            SPOOL,
        ),
        _row(
            "the budget has no end",
            "if self._used + nbytes > self.limit:",
            "if nbytes > 2**62:",
            "beyond the budget tensors lie in files",
            SPOOL,
        ),
        _row(
            "a budget below one shard is taken",
            "if nbytes > budget().limit:",
            "if nbytes > 2**62:",
            "a budget too small for one shard is refused",
            SPOOL,
        ),
        _row(
            "an error of the disk is not translated",
            "except (OSError, RuntimeError) as error:",
            "except MemoryError as error:",
            "a full disk is a typed error that names what was to be kept, the folder and the setting",
            SPOOL,
        ),
    ),
    *_in(
        "diloco_orchestrator/allreduce/payload_cache.py",
        _row(
            "the cache knows payloads by digest alone",
            ("        return self._memory.get(name)\n"),
            ("        return next((data for known, data in self._memory.items() if known[1] == name[1]), None)\n"),
            "two replicas with equal bytes must both have been read",
            INTEGRITY,
            equivalent="whether an object was read is asked of its key too; bytes of one digest are the same bytes",
        ),
        _row(
            "files of the store stay open after their round",
            "            file.close()\n        self._opened.clear()\n",
            "            pass\n        self._opened.clear()\n",
            "a process runs out of open files",
            MAPPED,
        ),
        _row(
            "a cleared cache has less room",
            "        self._room = self._limit\n",
            "",
            "a cache that is cleared has its whole room again",
            CACHE,
        ),
        _row(
            "the file part of the cache reads from its start",
            "return mapped(self._file, size, offset)",
            "return mapped(self._file, size, 0)",
            "bytes beyond the memory bound come back as they were put",
            MEAN,
        ),
    ),
    *_in(
        "diloco_orchestrator/allreduce/mean.py",
        _row(
            "contributions are summed in the order of arrival",
            "self._parts = sorted(parts, key=lambda part: part.replica_id)",
            "self._parts = list(parts)",
            "the mean has the same bits in whatever order contributions came",
            MEAN,
        ),
        _row(
            "weights are ignored",
            "weighted = weighted * weight",
            "weighted = weighted * 1.0",
            "a contribution counts by its weight",
            MEAN,
        ),
        _row(
            "the sum is divided by the number of contributions",
            "self._total = self._total + weight",
            "self._total = self._total + 1",
            "the mean is over the sum of the weights",
            MEAN,
        ),
        _row(
            "weights are taken as they are",
            'torch.tensor(part.weight / largest, dtype=torch.float32, device="cpu")',
            'torch.tensor(part.weight, dtype=torch.float32, device="cpu")',
            "token counts beyond 2**24 keep their ratio",
            MEAN,
        ),
        _row(
            "a fused multiply-add",
            "summed.add_(weighted)",
            "summed.addcmul_(block.to(torch.float32), weight)",
            "multiply and add stay apart: the same bits on every CPU",
            OUTER_STEP,
        ),
        _row(
            "the sum begins with the first contribution",
            "torch.add(weighted, 0.0, out=summed)",
            "summed.copy_(weighted)",
            "the mean has the bits of a sum that begins at zero",
            MEAN,
        ),
        _row(
            "the last part of a shard is left as it was",
            "for blocks in zip(*shards, strict=True):",
            "for blocks in list(zip(*shards, strict=True))[:1]:",
            "the blocks of a shard are averaged to its end",
            MEAN,
        ),
        _row(
            "payloads of another cut are averaged",
            "if cut != list(lengths)",
            "if False",
            "a payload that is cut otherwise is refused, not averaged in part",
            MEAN,
        ),
    ),
    *_in(
        "diloco_orchestrator/outer/nesterov.py",
        _row(
            "the outer step climbs",
            "parameter.sub_(direction.mul_(outer.lr))",
            "parameter.add_(direction.mul_(outer.lr))",
            "the outer step descends along base - local",
            OUTER_STEP,
        ),
        _row(
            "no look-ahead",
            "if outer.nesterov else momentum.clone()",
            "if not outer.nesterov else momentum.clone()",
            "the outer step is Nesterov's",
            OUTER_STEP,
        ),
        _row(
            "momenta stay behind",
            "momentum.mul_(outer.momentum).add_(gradient)",
            "momentum = (momentum * outer.momentum).add_(gradient)",
            "a step that is taken moves the momenta too",
            OUTER_STEP,
        ),
    ),
    *_in(
        "diloco_orchestrator/outer/outer_step.py",
        _row(
            "every block steps the first one",
            "        start = stop\n",
            "",
            "a shard is stepped to its end",
            OUTER_STEP,
        ),
        _row(
            "an average that is not asked for is kept",
            "if keep_average else {}",
            "if True else {}",
            "who does not ask for the average does not pay for it",
            OUTER_STEP,
        ),
    ),
    *_in(
        "diloco_orchestrator/outer/base.py",
        _row(
            "the digest leaves momenta out",
            "for tensor in (self.parameters, self.momenta):",
            "for tensor in (self.parameters,):",
            "the digest covers parameters and momenta",
            OUTER_STEP,
        ),
        _row(
            "the digest leaves shapes out",
            "[[[name, list(shape)] for name, shape in self.shapes(names).items()] for names in self.fragments]",
            "[[[name] for name in self.shapes(names)] for names in self.fragments]",
            "the digest covers shapes",
            OUTER_STEP,
        ),
        _row(
            "the digest leaves the shard size out",
            '{"fragments": fragments, "shard_numel": self.shard_numel}',
            '{"fragments": fragments}',
            "the digest covers the layout",
            OUTER_STEP,
        ),
        _row(
            "a parameter across two shards is cut off",
            "self.vector.read(start, start + numel)",
            "torch.cat([pieces[0], torch.zeros(numel - len(pieces[0]))]) if pieces else torch.zeros(0)",
            "a base has the same values however it is cut into shards",
            OUTER_STEP,
        ),
    ),
    *_in(
        "diloco_orchestrator/snapshots/stored.py",
        _row(
            "a snapshot's file is not hashed when it is read",
            "if bulk_digest(data) != self.record.files[name].digest:",
            "if False:",
            "a file that was changed after it was written is found",
            SNAPSHOTS,
        ),
        _row(
            "a snapshot's base is not compared with its record",
            "if (digest := base.digest()) != self.record.base_digest:",
            "if (digest := base.digest()) == '':",
            "a snapshot whose files hold another base is refused",
            SHARDS,
        ),
        _row(
            "verify reads only the files of the base",
            "            if name not in needed:\n                self.file(name)\n",
            "            pass\n",
            "verify hashes every file of every snapshot",
            VERIFY,
        ),
        _row(
            "a snapshot may name paths",
            'if name in ("", ".", "..") or set(name) &',
            "if False and set(name) &",
            "no file of a snapshot is written outside its folder",
            SHARDS,
        ),
        _row(
            "the model's file is read again for every tensor",
            "            self._model_file = (name, tensors)\n",
            "            pass\n",
            "every file of a snapshot is fetched once",
            SHARDS,
        ),
    ),
    *_in(
        "diloco_orchestrator/snapshots/file_plan.py",
        _row(
            "a file may exceed the limit by its header",
            "        share = largest_share(name, specs[name])",
            "        share = specs[name].nbytes",
            "no file of a snapshot is larger than the limit",
            SHARDS,
        ),
        _row(
            "a record that lacks a shard is read",
            "    if found != expected:",
            "    if False:",
            "a shard that is missing is named",
            SHARDS,
        ),
        _row(
            "a model that fits is cut",
            "    if whole.size <= limit:",
            "    if whole.size < limit:",
            "what fits into one file stays one file",
            SHARDS,
        ),
    ),
    *_in(
        "diloco_orchestrator/snapshots/tensor_file.py",
        _row(
            "tensors lie in the order of their names",
            "key=lambda name: (_RANK[specs[name].dtype], name))",
            "key=lambda name: name)",
            "a file has the bytes that safetensors gives it",
            SHARDS,
        ),
        _row(
            "a state that is too long is read",
            "if len(self._rest) or any(self._pieces):",
            "if False:",
            "bytes that are no state are refused",
            SAVED_STATE,
        ),
    ),
    *_in(
        "diloco_orchestrator/snapshots/saved_state.py",
        _row(
            "a large state is one object",
            "<= limit:",
            ">= 0:",
            "no object is larger than the limit",
            SAVED_STATE,
        ),
    ),
    *_in(
        "diloco_orchestrator/inspection/pull.py",
        _row(
            "a pull that fails leaves what it wrote",
            "        shutil.rmtree(draft, ignore_errors=True)",
            "        pass",
            "a folder exists only if all of its files were good",
            SHARDS,
        ),
    ),
    *_in(
        "diloco_orchestrator/store/s3_multipart.py",
        _row(
            "an upload in parts replaces what exists",
            '{"IfNoneMatch": "*"}',
            "{}",
            "one of racing creators wins, also in parts",
            MULTIPART,
        ),
        _row(
            "parts of an upload that failed stay",
            "                client.abort_multipart_upload(**upload)",
            "                pass",
            "an upload that fails takes its parts back",
            MULTIPART,
        ),
    ),
    *_in(
        "diloco_orchestrator/store/s3.py",
        _row(
            "bodies are hashed over TLS",
            "        unsigned_payload=_is_tls(endpoint),",
            "        unsigned_payload=False,",
            "bodies are not signed over TLS",
            MULTIPART,
        ),
        _row(
            "bodies are not signed over http",
            "        unsigned_payload=_is_tls(endpoint),",
            "        unsigned_payload=True,",
            "bodies are signed over http",
            MULTIPART,
        ),
    ),
    *_in(
        "diloco_orchestrator/snapshots/layout.py",
        _row(
            "bf16 snapshots lose the base's fp32 digits",
            "return base.parameters[name.removeprefix(_BASE)]",
            "return base.parameters[name.removeprefix(_BASE)].to(torch.bfloat16).to(torch.float32)",
            "a snapshot gives back every bit of the base, whatever the model's dtype",
            SNAPSHOTS,
        ),
        _row(
            "a half-written snapshot of another base is completed",
            "    if all_ours or _existing_base(",
            "    if True or _existing_base(",
            "files that another writer left are adopted only if they hold the same base",
            SNAPSHOTS,
        ),
        _row(
            "a snapshot begun in another layout is completed",
            "    if other is not None:\n        raise RecordInvalid(",
            "    if False:\n        raise RecordInvalid(",
            "a loader never finds two models in one snapshot",
            SHARDS,
        ),
        _row(
            "snapshots overwrite each other",
            "    if not exists and without_read_back(store).create(key, data):",
            "    if store.put(key, data) is None:",
            "the first complete snapshot wins",
            SNAPSHOTS,
        ),
        _row(
            "snapshots leave frozen parameters out",
            "{**rest.specs(), **trained}",
            "{**trained}",
            "a snapshot holds the whole model",
            SNAPSHOTS,
        ),
        _row(
            "tied tensors are written twice",
            "if name in trained or (tensor.numel() and tensor.data_ptr() in seen):",
            "if name in trained:",
            "a tied tensor is written once, as transformers expects",
            SNAPSHOTS,
        ),
        _row(
            "another model is let in",
            ("        if mine == run:\n            continue"),
            ("        if mine == run or mine is None:\n            continue"),
            "a replica whose model lacks a parameter is refused",
            PARTICIPANT,
        ),
    ),
    *_in(
        "diloco_orchestrator/snapshots/confirmation.py",
        _row(
            "a writer confirms its own snapshot",
            "            and manifest.replica_id != record.by\n",
            "",
            "a snapshot is confirmed by somebody who did not write it",
            CONFIRMATION,
        ),
        _row(
            "who loaded a snapshot confirms it",
            "            and manifest.snapshot_round < round_\n",
            "",
            "a claim confirms only if its base descends from an older snapshot",
            CONFIRMATION,
        ),
        _row(
            "a replay confirms nothing",
            "if any(replay.base_digest == record.base_digest for replay in self._log.replays(round_)):",
            "if False:",
            "a replay confirms the snapshot of its base",
            CONFIRMATION,
        ),
        _row(
            "any snapshot is confirmed",
            "            manifest.base_digest == record.base_digest\n            and",
            "            True\n            and",
            "a claim confirms the snapshot with its digest",
            CONFIRMATION,
        ),
    ),
    *_in(
        "diloco_orchestrator/snapshots/rebuild.py",
        _row(
            "a snapshot of a history left behind is rebuilt from",
            "if begin.after_round >= round_ != begin.from_round or (until",
            "if (until",
            "snapshots between a leg's first base and the leg belong to a history left behind",
            LEGS,
        ),
        _row(
            "rounds that moved nothing are taken for bases",
            "return replace(tip, position=entry.position, last=entry)",
            "return replace(tip, base_round=commit.round, position=entry.position, last=entry)",
            "a round that is not applied makes no base",
            INTEGRITY,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/claims.py",
        _row(
            "the decider's own base is named",
            "    if any(claim.digest == own for claim in tied):\n        return own",
            "    return own",
            "a decision needs no base of one's own",
            CLAIM_RULES,
        ),
        _row(
            "abstentions vote on the claim",
            '[claim for claim in claims if claim.kind != "abstention"] or list(claims)',
            "list(claims)",
            "abstentions decide only where there is nothing else",
            CLAIM_RULES,
        ),
        _row(
            "who is healed still names a lone wrong claim",
            "if largest == 1 and own_is_rebuilt:",
            "if False:",
            "a rebuilt base that nobody claims names nobody",
            CLAIM_RULES,
        ),
        _row(
            "the largest group rebuilds too",
            "if not others or sizes[own] > max(sizes[digest] for digest in others):",
            "if not others:",
            "nobody in the strictly largest group rebuilds",
            CLAIM_RULES,
        ),
        _row(
            "a claim is rebuilt for again and again",
            "return frozenset(others - set(asked))",
            "return frozenset(others)",
            "a base is rebuilt once per round and claim",
            CLAIM_RULES,
        ),
        _row(
            "a wrong abstention keeps its kind",
            'answer.kind in ("delta", "scores", "abstention")',
            'answer.kind in ("delta", "scores")',
            "scores of a wrong base are not folded, whoever sends them",
            CLAIM_RULES,
        ),
        _row(
            "who never rebuilt leaves",
            "if not own.is_fresh(commit.round) or all(",
            "if all(",
            "a transient fault removes nobody (I2)",
            CLAIM_RULES,
        ),
        _row(
            "a smaller group drives out a larger one",
            "return len(named) > group or all(claim.is_fresh(commit.round) for claim in named)",
            "return True",
            "only a stronger group outvotes a replica",
            CLAIM_RULES,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/weights.py",
        _row(
            "tokens of carried work ignored",
            "tokens * steps // own",
            "tokens",
            "by tokens, a contribution weighs more for the steps that it carries",
            WEIGHT_RULES,
            CARRY,
        ),
        _row(
            "a partial round weighs as much as a whole one",
            "return config.sync_every - (max(0, config.round_steps - steps) if own else 0)",
            "return config.sync_every",
            "a partial contribution weighs less by the steps it lacks",
            WEIGHT_RULES,
        ),
        _row(
            "a carrying contribution weighs more than a whole round",
            "max(0, config.round_steps - steps)",
            "(config.round_steps - steps)",
            "with uniform weights no contribution weighs more than a whole round",
            WEIGHT_RULES,
        ),
        _row(
            "any weights are averaged",
            "        if answer.averaged and answer.weight != (derived := _weight(commit, answer, config)):",
            "        if not (derived := _weight(commit, answer, config)):",
            "a commit whose weights do not follow averages nobody",
            WEIGHT_RULES,
        ),
        _row(
            "a void commit counts as an outer step",
            '"outer_step": commit.outer_step - commit.applied,',
            '"outer_step": commit.outer_step,',
            "a void commit leaves the base and its outer steps",
            WEIGHT_RULES,
        ),
    ),
    *_in(
        "replica/rounds/want.py",
        _row(
            "nobody answers requests for payloads",
            "if shard is None or (data := self.payloads.held(str(shard.first_take))) is None:",
            "if True or (data := self.payloads.held(str(shard.first_take))) is None:",
            "whoever holds a payload that somebody asks for puts it again",
            WANT,
        ),
        _row(
            "a take that was lost is not asked for again",
            "if shard.take not in self._takes(shard) and",
            "if shard.take not in self._takes(shard) and shard.take == 2 and",
            "a take that the store damages is followed by another one",
            WANT,
        ),
        _row(
            "who asks waits for a take though a snapshot replaces it",
            "            if newest >= shard.round:\n                raise PayloadGone",
            "            if False:\n                raise PayloadGone",
            "a confirmed snapshot ends the wait for a payload",
            WANT,
        ),
        _row(
            "who asks answers nobody",
            "            self.put_wanted(shard.round)\n            clock",
            "            clock",
            "replicas that lack each other's payload help each other",
            WANT,
        ),
    ),
    *_in(
        "diloco_orchestrator/allreduce/recent_payloads.py",
        _row(
            "bytes are dropped with their round",
            "self._open, self._before = self._before, self._open",
            "self._open.clear()",
            "verified bytes are held for others until the next commit",
            WANT,
        ),
    ),
    *_in(
        "replica/rounds/carry.py",
        _row(
            "carry from another base",
            "elif is_right(manifest):",
            "elif True:",
            "work from another base than the round's is dropped, never carried",
            CARRY,
        ),
        _row(
            "averaged work is carried too",
            ("            self._carried.pop(manifest.fragment, None)\n"),
            ("            self._carried[manifest.fragment] = manifest\n"),
            "no inner step counts twice (I4)",
            ELASTIC,
        ),
        _row(
            "staleness counts rounds",
            "staleness = max(1, (round_ - carried.round) // self._fragments)",
            "staleness = max(1, round_ - carried.round)",
            "staleness is counted in synchronisations of the fragment",
            ELASTIC,
        ),
        _row(
            "an abstention forgets the carry",
            ('        if manifest.kind != "delta":\n            return False\n        for origin'),
            (
                '        if manifest.kind != "delta":\n'
                "            self._carried.clear()\n"
                "            return False\n"
                "        for origin"
            ),
            "an abstention leaves what is owed",
            ELASTIC,
        ),
        _row(
            "dropped work is not listed",
            (
                'dropped: late is set to drop", _steps(carried), carried.round)\n            return WithCarry(pseudo_gradient, dropped=(*lost, *carried.origins))'
            ),
            (
                'dropped: late is set to drop", _steps(carried), carried.round)\n            return WithCarry(pseudo_gradient, dropped=lost)'
            ),
            "work that is dropped is listed in the manifest (I4)",
            ELASTIC,
        ),
        _row(
            "a carry whose payload went bad is listed as counted",
            ("_steps(carried), carried.round, error)\n            return WithCarry(pseudo_gradient, dropped="),
            ("_steps(carried), carried.round, error)\n            return WithCarry(pseudo_gradient, carried="),
            "a carry that cannot be read is listed as dropped, not as counted (I4)",
            ELASTIC,
        ),
        _row(
            "carried work counts in full",
            "carried.payload, shards, carry_weight(staleness))",
            "carried.payload, shards, 1.0)",
            "carried work counts less",
            ELASTIC,
        ),
        _row(
            "a restarted replica carries its oldest contribution",
            ("        for round_ in rounds:\n            manifest = manifest_of(round_)"),
            ("        for round_ in reversed(rounds):\n            manifest = manifest_of(round_)"),
            "a restarted replica carries what its newest contribution of a fragment holds",
            ELASTIC,
        ),
        _row(
            "half a carry is added",
            "            if low < stop and start < high:\n",
            "            if low < stop and start < high and not index:\n",
            "a carry of several shards is added whole",
            ELASTIC,
        ),
    ),
    *_in(
        "replica/rounds/contribution_history.py",
        _row(
            "an older state is loaded",
            (
                'if manifest is not None and manifest.kind == "delta" and is_right(manifest):\n                return manifest'
            ),
            (
                'if manifest is not None and manifest.kind == "delta" and manifest.state is not None:\n'
                "                return manifest"
            ),
            "optimizer moments of an older contribution are never put on a newer base",
            RESTART,
        ),
        _row(
            "an announcement is taken for the newest progress",
            ("if manifest is not None and manifest.progress is not None:\n                return manifest"),
            ("if manifest is not None:\n                return manifest if manifest.progress is not None else None"),
            "a replica goes on from its newest manifest that has progress",
            FLEET_CLAIMS,
        ),
    ),
    *_in(
        "replica/rounds/first_base.py",
        _row(
            "each replica keeps its own first values",
            "            self._own.fill({name: each for name, each in tensors.items() if name in self._files.dtypes}, {})\n",
            "",
            "whoever comes first decides the first base for all",
            PARTICIPANT,
        ),
        _row(
            "a replica with equal values takes another's file for its own",
            "if not without_read_back(self._attempt.store).create(",
            "if not self._attempt.store.create(",
            "one replica uploads the first base",
            FIRST_BASE,
        ),
        _row(
            "nobody waits for the writer of the first base",
            "return not existing or now - self._since >=",
            "return now - self._since <=",
            "one replica uploads the first base",
            FIRST_BASE,
        ),
        _row(
            "a writer that died is waited for without end",
            "return not existing or now - self._since >= rank * (_GRACE_S + next_size / _SLOW_LINK)",
            "return not existing",
            "a first base whose writer died is completed by the next",
            FIRST_BASE,
        ),
        _row(
            "patience ends though the writer goes on",
            "        if existing != self._seen:",
            "        if self._seen is None:",
            "a replica waits as long as files are added",
            FIRST_BASE,
        ),
    ),
    *_in(
        "replica/rounds/snapshot_writer.py",
        _row(
            "snapshots are due by rounds",
            "commit.outer_step % self._attempt.config.snapshot_every",
            "commit.round % self._attempt.config.snapshot_every",
            "snapshots count outer steps, not rounds",
            INTEGRITY,
        ),
        _row(
            "rounds that moved nothing are snapshotted",
            "if commit is None or not commit.applied or commit.outer_step",
            "if commit is None or commit.outer_step",
            "a snapshot is due after an applied round",
            INTEGRITY,
        ),
        _row(
            "only replica 0 writes snapshots",
            "if min(averaged) != self._attempt.replica_id:",
            "if self._attempt.replica_id != 0:",
            "the contributor with the lowest id writes the snapshot",
            INTEGRITY,
        ),
    ),
    *_in(
        "replica/rounds/inbox.py",
        _row(
            "manifests copied from elsewhere count",
            "return (manifest.round, manifest.leg, manifest.replica_id) == (expected.round, expected.leg, replica_id)",
            "return True",
            "a manifest of another round, leg or replica is no contribution",
            PARTICIPANT,
        ),
        _row(
            "payloads of another fragment count",
            "if manifest.payload is None or manifest.fragment != expected.fragment:",
            "if manifest.payload is None:",
            "a payload of another fragment is never averaged",
            PARTICIPANT,
        ),
        _row(
            "an unverified shard in the mean",
            "            self._cache.put(name, fetch(self._store, name[0], manifest.payload, index))",
            "            self._cache.put(name, self._store.get(name[0]))",
            "every payload byte is verified before anyone decides anything",
            PARTICIPANT,
        ),
        _row(
            "our own payload is read back",
            "        if name in self._cache:\n            return None\n",
            "",
            "a replica does not read what it published",
            INTEGRITY,
        ),
        _row(
            "a changed manifest is followed from memory",
            "if received and received.manifest and received.answer.manifest_sha256 == answer.manifest_sha256:",
            "if received and received.manifest:",
            "who follows a commit averages the manifests that it names",
            INTEGRITY,
        ),
        _row(
            "answers of replicas that do not exist count",
            "if parsed and parsed[1] < expected.config.replicas and parsed[1] not in self._received:",
            "if parsed and parsed[1] not in self._received:",
            "only the run's replicas take part in a round",
            INTEGRITY,
        ),
    ),
    *_in(
        "replica/rounds/close_round.py",
        _row(
            "chain link unchecked in follow",
            ("        check_link(entry, self._model.position)\n"),
            "",
            "who follows a commit checks that it continues the log it knows",
            INTEGRITY,
        ),
        _row(
            "the first round of a leg forgets the guard state",
            "last_guard = model.last.commit.guard if model.last else attempt.begin.guard",
            "last_guard = model.last.commit.guard if model.last else None",
            "a leg starts with the guard state that its begin names",
            LEGS,
        ),
        _row(
            "late manifests are read after the others",
            "        for each in beside:\n            each.result()\n",
            "        for each in beside:\n            each.result()\n        self._read_late()\n",
            "who was late in the last round costs the others no round trip",
            ROUND_TRIPS,
        ),
        _row(
            "late work is forgotten",
            ("        self._contributor.settle(entry.commit)\n"),
            ("        pass\n"),
            "work that no commit averaged is carried (I4)",
            ELASTIC,
        ),
        _row(
            "who came late twice is forgotten",
            ("        self._late = set()\n        self._healed = False\n"),
            "        self._healed = False\n",
            "latecomers are those of the round that closed last",
            CARRY,
        ),
        _row(
            "halts are not obeyed",
            'halt=self._halt.reason if self._halt else "",',
            'halt="",',
            "a halt request stops the run after the open round",
            PARTICIPANT,
        ),
    ),
    *_in(
        "replica/rounds/global_model.py",
        _row(
            "a claim is noted after the step",
            "        self._digest = self.base.digest(self.attempt.background)\n        return self._digest",
            "        self._digest = self._digest or self.base.digest(self.attempt.background)\n        return self._digest",
            "a claim is hashed when the contribution is published",
            FLIPS,
        ),
        _row(
            "nobody heals",
            "        if not (new := set(claims) - self._asked - {self.digest}):\n            return False\n",
            "        return False\n        new: set[str] = set()\n",
            "a wrong bit is healed within two rounds (I2)",
            FLIPS,
        ),
        _row(
            "wrong work is carried",
            "        return manifest.base_digest == (before or self.commit_of(manifest.round).base_digest)",
            "        return True",
            "work from a wrong base is dropped",
            CARRY,
        ),
        _row(
            "a step that was interrupted is taken up again",
            "        self._digests[self._tip.base_round], self._digest = self.digest, None\n",
            "        self._digests[self._tip.base_round] = self.digest\n",
            "a base that was stepped half-way is rebuilt",
            INTEGRITY,
        ),
        _row(
            "fragments move by rounds",
            "return self.position.outer_step % len(self._fragments)",
            "return self.position.round % len(self._fragments)",
            "the order of fragments counts outer steps, not rounds",
            FLEET_CLAIMS,
        ),
    ),
    *_in(
        "replica/rounds/contribute.py",
        _row(
            "what is owed survives the stop",
            ('            self._carry.drop_all("the run has stopped")\n'),
            ("            pass\n"),
            "a carry left at a stop is dropped with a word (I4)",
            ELASTIC,
        ),
        _row(
            "a newcomer stays unannounced",
            "if last is None or not self._timing.elastic or expected:",
            "if True:",
            "a replica that comes back is waited for again",
            ELASTIC,
        ),
        _row(
            "the loser of a manifest counts its own work",
            ("            manifest = existing\n"),
            ("            pass\n"),
            "of two attempts' manifests the first create is the replica's response",
            PARTICIPANT,
        ),
    ),
    *_in(
        "replica/process/attempt.py",
        _row(
            "an older attempt goes on",
            "        if newest > self.number:",
            "        if newest > self.number + 1:",
            "an attempt leaves when a later one of its replica claims its place",
            PARTICIPANT,
        ),
        _row(
            "two processes claim one attempt",
            "    return store.create(keys.claim(replica_id, number), claim.to_bytes())",
            "    return store.create(keys.claim(replica_id, number), claim.to_bytes()) or True",
            "an attempt is claimed by one process",
            PARTICIPANT,
        ),
    ),
    *_in(
        "replica/rounds/timing.py",
        _row(
            "a cut replica asks for the commit in every step",
            "return self.train_s > _POLL_FROM * deadline.deadline_s",
            "return True",
            "a replica on the roster polls only from 90 % of its straggler deadline on",
            FLEET_CLAIMS,
        ),
        _row(
            "a cut replica never asks for the commit",
            "return self.train_s > _POLL_FROM * deadline.deadline_s",
            "return False",
            "a replica whose round went on without it notices between inner steps",
            TIMING,
            equivalent="a replica that would still train at 90 % of the deadline is found to be behind before, and answers with its part; one off the roster asks anyway",
        ),
        _row(
            "a slow replica never gives a part",
            "return step_s * whole > deadline.deadline_s and elapsed + step_s > deadline.median_s",
            "return False",
            "a replica that cannot finish by the deadline publishes the part it has",
            TIMING,
        ),
        _row(
            "the straggler deadline holds in a leg's first round",
            "return None if first else self._times.deadline()",
            "return self._times.deadline()",
            "a leg's first round waits for everybody to start",
            ELASTIC,
            LEGS,
            equivalent="train times are noted from closed rounds of the leg, so none is known in its first round",
        ),
    ),
    *_in(
        "replica/rounds/transfer.py",
        _row(
            "a round is closed before its publishing",
            "        self._published.result()\n        closed = close()",
            "        closed = close()",
            "nobody waits for a round to which it has yet to contribute",
            PARTS,
        ),
        _row(
            "errors beside training are kept to the end",
            "            if each is not None and each.done():",
            "            if False and each is not None:",
            "an error beside training is raised in the next inner step",
            PARTS,
            SESSION,
        ),
    ),
    *_in(
        "replica/rounds/participant.py",
        _row(
            "the position moves under training",
            "return self._in_flight.open if self._in_flight else OpenRound.of(self.model)",
            "return OpenRound.of(self.model)",
            "training sees a round move only when it takes its base",
            PARTS,
        ),
        _row(
            "a round's time begins beside training",
            "            self.timing.open_round()\n        self.attempt.pulse",
            "        self.attempt.pulse",
            "the train time of a round has no inner steps of the round before",
            PARTS,
        ),
        _row(
            "the result names no commit",
            ("        self.attempt.store.create(keys.result(result.leg), result.to_bytes())\n"),
            ("        pass\n"),
            "replicas write the leg's result after its stop",
            PARTICIPANT,
        ),
    ),
    *_in(
        "replica/training/session.py",
        _row(
            "a round in flight outlives its session",
            "        self._participant.give_up()\n",
            "",
            "a round in flight is given up when its session has ended",
            SESSION,
        ),
        _row(
            "after an abstention the model is not the base",
            ("        self._loop.load_base()\n        self._optimizers.zero_grad()\n        if state is None"),
            ("        self._optimizers.zero_grad()\n        if state is None"),
            "after an abstention the replica goes on from the base",
            RESTART,
        ),
        _row(
            "after an abstention the optimizer stays poisoned",
            ("            self._go_back(saved, self._checkpoint.reset_not_finite)\n"),
            ("            self._go_back(saved, lambda: None)\n"),
            "what is not finite in the inner optimizer starts anew after an abstention",
            SESSION,
        ),
        _row(
            "replicas train on the same data order",
            "TrainingPosition(self.metrics, config.seed + 1 + attempt.replica_id)",
            "TrainingPosition(self.metrics, config.seed + 1)",
            "from batches on, each replica has a random state of its own",
            RESTART,
        ),
        _row(
            "a notice publishes part of a strict round",
            "    if participant.timing.elastic and trained:",
            "    if trained:",
            "with quorum all a notice to leave publishes nothing partial",
            SESSION,
        ),
        _row(
            "a notice publishes nothing",
            ("        loop.publish_part()\n"),
            ("        pass\n"),
            "a notice publishes what is trained where partial work counts",
            "tests/run/test_elastic_runs.py -m slow",
        ),
        _row(
            "who loses its manifest keeps its own cursor",
            "            self._continue_after(contribution, contribution.progress)\n",
            "            pass\n",
            "who loses the race for its manifest goes on from the winner's progress",
            FLEET_CLAIMS,
        ),
        _row(
            "who loses its manifest trains none of the steps after it",
            "        if local and self._loop.schedule.overlaps:  # that attempt",
            "        if False:  # that attempt",
            "with an overlap the winner's steps between its contribution and the close are trained again",
            "tests/simulation/test_simulation.py -k once_found",
        ),
        _row(
            "snapshots are never due",
            ("        self._write_snapshot_if_due()\n        while not self.stopped:"),
            "        while not self.stopped:",
            "a replica writes the snapshots that are due",
            FLEET_CLAIMS,
        ),
    ),
    *_in(
        "replica/training/position.py",
        _row(
            "a restarted attempt begins its data anew",
            ("            self._cursor.seek(self._resumed.cursor)\n"),
            "            pass\n",
            "a restarted attempt repeats no published batch",
            SESSION,
        ),
        _row(
            "a restarted attempt draws other random numbers",
            ("        rng.restore(self._resumed.rng)\n"),
            "",
            "a restarted attempt goes on with the random state of its newest manifest",
            SESSION,
        ),
    ),
    *_in(
        "replica/interop/loader_stream.py",
        _row(
            "a stream begins an epoch's order from the present random state",
            '        rng.restore(self._chance["process"])\n',
            "",
            "in the middle of an epoch a restarted trainer goes on in its order",
            "tests/replica/test_trainer_parts.py",
        ),
        _row(
            "batches are dealt anew in each epoch",
            "            self._before += self._epochs.seen\n",
            "",
            "every batch is one replica's, over all epochs",
            "tests/replica/test_trainer_parts.py",
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/extra_limits.py",
        _row(
            "a limit fires in the warm-up",
            "count >= config.min_steps and average > limit",
            "average > limit",
            "a metric's limit fires from min_steps rounds on",
            "tests/replica/test_own_metrics.py",
        ),
    ),
    *_in(
        "replica/training/small_state.py",
        _row(
            "schedules are not saved",
            "_OBJECTS: dict(self._states(small=True))",
            "_OBJECTS: {}",
            "a restarted replica goes on with its learning-rate schedule",
            EXACT_RESUME,
        ),
    ),
    *_in(
        "replica/training/round_metrics.py",
        _row(
            "metrics of a round run on into the next",
            ("        self._values = {}\n        return taken\n"),
            ("        return taken\n"),
            "a manifest's metrics are of its own round",
            SESSION,
        ),
        _row(
            "steps are reported twice",
            ("        self.inner_steps = self.tokens = 0\n"),
            ("        self.tokens = 0\n"),
            "a manifest counts the inner steps since the manifest before",
            SESSION,
        ),
        _row(
            "the training metric is of the whole round",
            "early = values[: -(-len(values) // 8)]",
            "early = values",
            "the training metric is the mean of the round's first eighth",
            RESTART,
        ),
    ),
    *_in(
        "replica/training/heldout_scorer.py",
        _row(
            "the base is scored once for all rosters",
            "return self._scored == (version, roster)",
            "return self._scored[0] == version",
            "a share dealt anew is scored by its new owner, though the base is the same",
            FLEET_CLAIMS,
        ),
        _row(
            "losses are published as they are",
            'SIGN = {"loss": -1.0, "reward": 1.0}',
            'SIGN = {"loss": 1.0, "reward": 1.0}',
            "in records higher is better",
            SESSION,
        ),
        _row(
            "scoring draws training's random numbers",
            ("        rng.restore(generators)\n"),
            ("        pass\n"),
            "scoring does not disturb training",
            SESSION,
        ),
        _row(
            "the model is left in evaluation mode",
            ("            module.training = training\n"),
            ("            pass\n"),
            "scoring leaves the model's mode as it was",
            SESSION,
        ),
    ),
    *_in(
        "replica/training/diloco_loop.py",
        _row(
            "a delay overlaps nothing",
            "            self._publish(fragment.handed_over(self._rounds.base), in_background=True)",
            "            self._publish(fragment.handed_over(self._rounds.base), in_background=False)",
            "with a delay the round goes by beside training",
            LOOP,
        ),
        _row(
            "a cut keeps the step count",
            ("        fragment.install(self._rounds.base, keep)\n        self.inner_step, self.published = 0, False"),
            ("        fragment.install(self._rounds.base, keep)\n        self.published = False"),
            "after a cut a replica trains a whole round",
            TIMING,
        ),
        _row(
            "a cut publishes nothing",
            ("        self.publish_part()\n        closed = self._rounds.close()"),
            "        closed = self._rounds.close()",
            "what a cut replica has trained is published (I4)",
            TIMING,
        ),
        _row(
            "a cut moves fragments that are not synchronised",
            ("        fragment.install(self._rounds.base, keep)\n"),
            ("        for each in self._fragments:\n            each.install(self._rounds.base, keep)\n"),
            "fragments that do not move keep what they were trained to",
            FLEET_CLAIMS,
        ),
        _row(
            "a restarted replica forgets what its fragments were trained to",
            ("            if index not in from_base:\n                fragment.restore"),
            ("            if False:\n                fragment.restore"),
            "a restarted replica goes on from its own values in the fragments that did not move",
            EXACT_RESUME,
        ),
        _row(
            "the local model is scored",
            ("        for fragment in self._fragments:\n            fragment.show(self._rounds.base)\n        try:"),
            "        try:",
            "what is scored is the global model",
            SESSION,
        ),
        _row(
            "part of a cut round is kept beside its carry",
            "keep = self.schedule.alpha if whole and closed.applied else 0.0",
            "keep = self.schedule.alpha",
            "the share alpha of a cut round does not count beside its carry (I4)",
            FLEET_CLAIMS,
            LOOP,
            TIMING,
            EXACT_RESUME,
        ),
        _row(
            "a round is published twice",
            ("        if self.published or self._rounds.closing:\n            return\n"),
            ("        if self._rounds.closing:\n            return\n"),
            "at most one contribution per round and replica",
            LOOP,
            SESSION,
        ),
        _row(
            "a base that was skipped to is not loaded",
            ("        if closed.skipped or closed.healed:\n            self.load_base()\n            return closed\n"),
            "",
            "over rounds whose payloads were deleted every fragment takes the newer base",
            LOOP,
            FLEET_CLAIMS,
            RESTART,
        ),
    ),
    *_in(
        "replica/training/fp32_shadow.py",
        _row(
            "values are taken when they are read",
            "        wait = self._handover.take(self._parameters)\n        return lambda: self._pseudo_gradient(base, wait())",
            "        return lambda: self._pseudo_gradient(base, self._handover.take(self._parameters)())",
            "a pseudo-gradient holds no inner step after its publishing",
            LOOP,
        ),
        _row(
            "staged values are installed again",
            "        staged, self._set_staged = self._set_staged, None",
            "        staged = self._set_staged",
            "what was staged for one round is not installed in the next",
            LOOP,
        ),
        _row(
            "bf16 base loses fp32 digits",
            "values = base + (values.to(torch.float32) - base.to(values.dtype).to(torch.float32))",
            "values = values.to(torch.float32)",
            "a bf16 model's base keeps the digits that bf16 cannot hold",
            RESTART,
        ),
    ),
    *_in(
        "replica/training/data_cursor.py",
        _row(
            "data is not started again at its end",
            "            self._epoch, self._batches, self._iterator = self._epoch + 1, 0, None",
            "            self._epoch, self._iterator = self._epoch + 1, None",
            "the position counts batches of the current epoch",
            SESSION,
        ),
        _row(
            "an epoch's random state is not restored",
            ('            rng.restore(position["chance"], self._generator)\n'),
            ("            pass\n"),
            "a shuffle comes out the same after a restart",
            SESSION,
        ),
    ),
    *_in(
        "replica/training/checkpoint.py",
        _row(
            "the state is saved a round late",
            "beside_snapshot = (outer_step + 1) % config.snapshot_every == 0",
            "beside_snapshot = outer_step % config.snapshot_every == 0",
            "a state is saved with the contribution before each snapshot",
            EXACT_RESUME,
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/round_fold.py",
        _row(
            "a share counts from any replica",
            "for share in dealt if share in first",
            "for share in range(len(heldout.shares)) if share in first",
            "a share counts only from the replica to which it was dealt",
            GUARD_CLAIMS,
        ),
        _row(
            "a share counts over any number of items",
            " and first[share].count == heldout.shares[share]]",
            "]",
            "a score over another number of items than the share has is missing",
            GUARD_CLAIMS,
        ),
        _row(
            "one KL moves the round's",
            "return median(finite) if",
            "return sum(finite) / len(finite) if",
            "one replica of eight halts no healthy run",
            GUARD_CLAIMS,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/records.py",
        _row(
            "a metric that is not finite counts as zero",
            "total = sum(finite) if len(finite) == len(present) else None",
            "total = sum(finite)",
            "a training metric that is not finite in one replica is not finite",
            INTEGRITY,
        ),
    ),
    *_in(
        "diloco_orchestrator/config_guard.py",
        _row(
            "a reward's gap is judged as a loss's",
            '_GAPS = {"loss": 0.5, "reward": 0.10}',
            '_GAPS = {"loss": 0.5, "reward": 0.5}',
            "the default gap of rewards is 0.10",
            GUARD_CLAIMS,
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/breadth.py",
        _row(
            "a few shares are enough to halt",
            "if not few or not sigma > 0:",
            "if True:",
            "a fall halts only without the quarter of the shares that carries most of it",
            "tests/guard/test_breadth.py",
        ),
        _row(
            "a share that always differs counts as a fall",
            "- (distance - self._usual.get(share, distance))",
            "- distance",
            "a share's part is counted from its usual distance",
            "tests/guard/test_breadth.py",
        ),
        _row(
            "shares that rise hide a fall",
            "extremes > _WITHOUT_EXTREMES * threshold",
            "extremes > 1e9 * threshold",
            "shares that rise on purpose do not hide a large fall",
            "tests/guard/test_breadth.py",
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/robust.py",
        _row(
            "shares count alike whatever their size",
            "math.fsum(weight * value for weight, value in values) / sum(weight for weight, _ in values)",
            "math.fsum(value for _, value in values) / len(values)",
            "a share counts by its items",
            GUARD_CLAIMS,
        ),
        _row(
            "a lie counts as far as it goes",
            "_CLIP = 2.5",
            "_CLIP = 2.5e9",
            "one replica of eight halts no healthy run",
            GUARD_CLAIMS,
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/fold.py",
        _row(
            "the closing round is not judged",
            'return (state["in_loop"] if evidence.closing else None), spread',
            "return None, spread",
            "the closing round is judged with the last training metric",
            FOLD,
        ),
        _row(
            "scores are not clipped",
            "    drift = clipped_mean(known, spread)\n",
            "    drift = ClippedMean(weighted_mean(known), spread)\n",
            "a lying share moves no other share's first score",
            GUARD_CLAIMS,
        ),
        _row(
            "a late share counts as a jump",
            "first.get(str(score.share), score.mean - drift.mean)",
            "first.get(str(score.share), score.mean)",
            "a share first seen later starts where the others are",
            FOLD,
        ),
        _row(
            "a missing share looks like a change",
            "return _Shares(everyone.mean + level, first, level, everyone.spread, scored, gains=gains)",
            "return _Shares(weighted_mean([(s.count, s.mean) for s in finite]), first, level, everyone.spread, scored)",
            "a missing share does not look like a change",
            FOLD,
        ),
        _row(
            "unfolded rounds add up over good ones",
            'unfolded = before["unfolded"] + 1 if why_not else 0',
            'unfolded = before["unfolded"] + (1 if why_not else 0)',
            "five rounds in a row that were not folded warn",
            GUARD_CLAIMS,
        ),
        _row(
            "a quarter of the items is enough",
            "needed = max(-(-total_items // 2), 1)",
            "needed = max(-(-total_items // 4), 1)",
            "fewer than half of the items are inconclusive",
            FOLD,
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/heldout.py",
        _row(
            "a fired guard recovers",
            ("        if self._fired_reason:\n            return _LATCHED + self._fired_reason"),
            ("        if False:\n            return _LATCHED + self._fired_reason"),
            "a fired guard stays fired",
            HELDOUT,
        ),
        _row(
            "one bad round fires",
            "_NONFINITE_ROUNDS = 2",
            "_NONFINITE_ROUNDS = 1",
            "one round without a finite score does not fire",
            HELDOUT,
        ),
        _row(
            "bad rounds add up over good ones",
            "self._nonfinite = 0 if finite else self._nonfinite + 1",
            "self._nonfinite = self._nonfinite if finite else self._nonfinite + 1",
            "only rounds in a row without a finite score fire",
            HELDOUT,
        ),
        _row(
            "the guard fires before min_steps",
            "if self._updates < self.min_steps:",
            "if self._updates < 1:",
            "no verdict but the one on finiteness before min_steps",
            HELDOUT,
        ),
        _row(
            "a decline is forgotten while training falls too",
            ("        if not declining:\n            self._streak = 0"),
            ("        if not declining or not rising:\n            self._streak = 0"),
            "the streak of declines ends only when the held-out score stops falling",
            HELDOUT,
        ),
        _row(
            "patience is one fold longer",
            "if self._streak >= self.decline_patience:",
            "if self._streak > self.decline_patience:",
            "decline_patience folds in a row fire",
            HELDOUT,
        ),
        _row(
            "a gap in the other direction fires",
            "return self._in_loop.gain - self._heldout.gain",
            "return abs(self._in_loop.gain - self._heldout.gain)",
            "the gap is training gain minus held-out gain",
            GUARD_CLAIMS,
        ),
        _row(
            "a restored guard forgets the streak",
            'guard._updates, guard._streak = state["updates"], state["streak"]',
            'guard._updates, guard._streak = state["updates"], 0',
            "a restored guard goes on exactly",
            GUARD_CLAIMS,
        ),
        _row(
            "a round is folded twice",
            (
                "        if self._last_inputs is not None and round_idx <= self._last_inputs[0]:\n"
                "            return self._again"
            ),
            ("        if False:\n            return self._again"),
            "no round is folded twice (I8)",
            HELDOUT,
        ),
        _row(
            "calibration loosens the hard stop",
            "max(min(factor * sum(kls) / len(kls), self.kl_hard_stop), 1e-6)",
            "max(factor * sum(kls) / len(kls), 1e-6)",
            "calibration never loosens the hard stop",
            HELDOUT,
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/shares.py",
        _row(
            "shares follow the order of the items",
            "ordered = sorted(items, key=content_hash)",
            "ordered = list(items)",
            "shares do not depend on the order of the items",
            SHARES,
        ),
        _row(
            "the share of who is absent is scored by nobody",
            ("        dealt[present[index % len(present)]].append(share)\n"),
            ("        pass\n"),
            "shares of those off the roster go to those on it",
            SHARES,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/next_leg.py",
        _row(
            "best base after a verdict ignored",
            "round if halted else known[-1]",
            "round if halted and False else known[-1]",
            "after a verdict a run resumes from the base with the best score",
            LEGS,
        ),
        _row(
            "guard state of the last commit instead",
            "guard=None if override_guard else _guard_state(run_log, origin, config),",
            "guard=None if override_guard else last.guard if last else None,",
            "a resumed leg starts with the guard state of its base's commit",
            LEGS,
        ),
        _row(
            "an override keeps the guard's state",
            "guard=None if override_guard else _guard_state(run_log, origin, config),",
            "guard=_guard_state(run_log, origin, config),",
            "an override begins with a new baseline",
            NEXT_LEG,
        ),
        _row(
            "a state that other settings reached goes on",
            "return run_log.configs.of(origin.commit.leg).guard == guard",
            "return True",
            "a leg from a base that other settings judged begins with a new baseline",
            NEXT_LEG,
        ),
        _row(
            "a leg forgets the settings of the leg before",
            "settings = {**before.settings, **change,",
            "settings = {**change,",
            "settings of a leg last until another leg changes them",
            NEXT_LEG,
        ),
        _row(
            "other thresholds need no reason",
            "    if guard and not override_guard:",
            "    if False:",
            "other settings of the guard need a reason",
            NEXT_LEG,
        ),
        _row(
            "a run that goes on is resumed",
            'if run_log.result(leg) is None and (last is None or last.leg != leg or last.stop == "none"):',
            "if False:",
            "resume is legal only after a stop",
            LEGS,
        ),
        _row(
            "a leg counts its outer steps from the last commit",
            "taken = origin.commit.outer_step if origin else 0",
            "taken = last.outer_step if last else 0",
            "a leg's outer steps are counted from its base",
            LEGS,
        ),
        _row(
            "a leg may start without a snapshot",
            ("    _ensure_snapshot(run_log, from_round, stamp)\n    position"),
            "    position",
            "a leg always starts from a snapshot",
            LEGS,
        ),
        _row(
            "two resumes begin two legs",
            "    if not run_log.store.create(keys.begin(begin.leg), begin.to_bytes()):",
            "    if run_log.store.create(keys.begin(begin.leg), begin.to_bytes()) is None:",
            "of two racing resumes one wins, the other raises",
            LEGS,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/healing.py",
        _row(
            "healing without end",
            "    if done >= on_halt.at_most:",
            "    if False:",
            "on_halt begins at most at_most legs",
            NEXT_LEG,
        ),
        _row(
            "healing against somebody's halt",
            "    if run_log.halt(leg) is not None:",
            "    if False:",
            "nothing is healed that somebody stopped",
            NEXT_LEG,
        ),
    ),
    *_in(
        "diloco_orchestrator/protocol/legs.py",
        _row(
            "the newest base is offered after a verdict",
            "if halted else known[-1]",
            "if False else known[-1]",
            "after a halt by the guard the best base is offered",
            NEXT_LEG,
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/per_replica.py",
        _row(
            "any number of contributions is left out",
            "order[: len(gains) // 4]",
            "order",
            "at most a quarter is left out",
            PER_REPLICA,
        ),
        _row(
            "a replica with harder data is suspect",
            "level = median([each.gain - self._usual(each)[1] for each in gains])",
            "level = median([each.gain for each in gains])",
            "a replica is compared with how it used to compare",
            PER_REPLICA,
        ),
        _row(
            "one round decides alone",
            "min(fallen - _SLACK, _LARGEST)",
            "fallen - _SLACK",
            "one round alone decides only if it is extreme",
            PER_REPLICA,
        ),
    ),
    *_in(
        "replica/rounds/carry.py",
        _row(
            "what was left out is carried",
            "        elif why := commit.quarantines(manifest.replica_id):",
            '        elif why := "":',
            "what the per-replica guard leaves out is dropped",
            PER_REPLICA,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/end_of_leg.py",
        _row(
            "the coordinator leaves the best base without a snapshot",
            "        if last.commit.halted_by_guard:",
            "        if False:",
            "after a halt by the guard the best base has a snapshot",
            NEXT_LEG,
        ),
        _row(
            "the coordinator's stop forgets the guard state",
            "guard=last.guard if last else self._begin.guard,",
            "guard=None,",
            "a stop by the coordinator keeps the guard state",
            LEGS,
        ),
        _row(
            "the coordinator's stop forgets the roster",
            "roster=last.roster if last else tuple",
            "roster=() if last else tuple",
            "a stop by the coordinator keeps the roster",
            LEGS,
        ),
        _row(
            "the coordinator's stop gives up when a replica commits first",
            "        while not self.reached():",
            "        for _ in range(1):",
            "a coordinator that loses the race for its stop starts over from the winner's commit",
            LEGS,
        ),
        _row(
            "the last base is sought in all legs",
            "and entry.commit.round - 1 > self._begin.after_round:",
            "and entry.commit.round > 1:",
            "a leg without an applied round ends with the base it started from",
            LEGS,
        ),
        _row(
            "no result where replicas died before writing it",
            ("            self._store.create(keys.result(self._begin.leg), result.to_bytes())\n        self._ensure"),
            ("            pass\n        self._ensure"),
            "the coordinator writes the result that no replica wrote",
            LEGS,
        ),
        _row(
            "no last snapshot where replicas died before writing it",
            ("        self._ensure_last_snapshot()\n"),
            "",
            "every leg ends with a snapshot",
            LEGS,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/retention.py",
        _row(
            "retention deletes the newest state",
            "if round_ is None or round_ > made.horizon or round_ == last or round_ in made.kept_snapshots:",
            "if round_ is None or round_ > made.horizon or round_ in made.kept_snapshots:",
            "each replica's newest state is kept",
            RETENTION_CLAIMS,
        ),
        _row(
            "retention deletes states beside kept snapshots",
            "if round_ is None or round_ > made.horizon or round_ == last or round_ in made.kept_snapshots:",
            "if round_ is None or round_ > made.horizon or round_ == last:",
            "states of rounds with a kept snapshot are kept",
            RETENTION,
        ),
        _row(
            "retention deletes owed payloads",
            "if whose in authors and whose not in carried:",
            "if whose in authors:",
            "a payload that a replica may still carry is kept",
            RETENTION,
        ),
        _row(
            "retention deletes payloads that are not named yet",
            "if whose in authors and whose not in carried:",
            "if whose is not None and whose not in carried:",
            "a payload without a manifest is kept",
            RETENTION,
        ),
        _row(
            "retention relies on one snapshot",
            ("        made.horizon = safe[0]\n"),
            ("        made.horizon = safe[-1]\n"),
            "payloads go once two snapshots come after them",
            RETENTION,
        ),
        _row(
            "retention deletes the best snapshot",
            ('    kept[scores.best(line)] = "best held-out score"\n'),
            "",
            "the snapshot with the best score is kept",
            RETENTION,
        ),
        _row(
            "retention deletes the snapshot that a leg starts from",
            ('        kept[begin.from_round] = f"leg {begin.leg} starts from it"\n'),
            ("        pass\n"),
            "snapshots where a leg begins are kept",
            RETENTION_CLAIMS,
        ),
        _row(
            "retention deletes the snapshot that a leg ended with",
            ('        kept[round_] = f"leg {leg} ended with it"\n'),
            ("        pass\n"),
            "snapshots where a leg ended are kept",
            RETENTION_CLAIMS,
        ),
        _row(
            "a snapshot's record goes last",
            "key=lambda info: (not info.key.endswith(keys.SNAPSHOT_RECORD), info.key))",
            "key=lambda info: (info.key.endswith(keys.SNAPSHOT_RECORD), info.key))",
            "snapshot.json is deleted before the files that it names",
            RETENTION,
        ),
        _row(
            "half-written snapshots go while somebody writes them",
            "and len(safe) >= SAFE_SNAPSHOTS and ended:",
            "and len(safe) >= SAFE_SNAPSHOTS:",
            "files without a record go only after a stop",
            RETENTION_CLAIMS,
        ),
        _row(
            "the sweeper sees only the first rounds",
            "self._queue, self._seen, self._planned_at = made.objects, made.horizon, last",
            "self._queue, self._seen, self._planned_at = made.objects, made.horizon + 10**6, last",
            "the sweeper keeps the number of objects bounded",
            RETENTION,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/fleet_policy.py",
        _row(
            "preemptions spend the errors' budget",
            "times = replica.endings.get(ended.outcome, 1)",
            "times = sum(replica.endings.values()) or 1",
            "each outcome has a budget of its own",
            FLEET,
        ),
        _row(
            "one relaunch too few",
            "    if times > budget.relaunches:",
            "    if times >= budget.relaunches:",
            "max_errors relaunches are allowed",
            FLEET,
        ),
        _row(
            "pauses do not double",
            "return float(min(first_s * 2 ** (times - 1), _LONGEST_PAUSE_S))",
            "return float(min(first_s, _LONGEST_PAUSE_S))",
            "pauses between relaunches double",
            FLEET,
        ),
        _row(
            "pauses grow without end",
            "_LONGEST_PAUSE_S = 60.0",
            "_LONGEST_PAUSE_S = 1e9",
            "pauses end at 60 s",
            FLEET,
        ),
        _row(
            "a permanent error is relaunched",
            '        return GiveUp(*replica.who, f"{who} cannot take part: {ended.reason}")',
            '        return Launch(replica.replica_id, replica.attempt + 1, "")',
            "a permanent error is never relaunched",
            FLEET,
        ),
        _row(
            "a halted run launches replicas",
            "if action is not None and not (view.halt and isinstance(action, Launch)):",
            "if action is not None:",
            "while a halt is requested nobody is launched",
            FLEET,
        ),
        _row(
            "a halt waits for replicas that hang",
            "return isinstance(state, Alive) and not isinstance(state, Cancelling) and not stuck_reason(state, now, policy)",
            "return isinstance(state, Alive)",
            "the coordinator commits the stop where fewer than a quorum are able to",
            FLEET,
        ),
        _row(
            "a run without its quorum goes on",
            "if lost and len(view.replicas) - len(lost) < quorum:",
            "if lost and len(view.replicas) - len(lost) < 0:",
            "a run whose quorum cannot be reached any more is stopped as failed",
            FLEET,
        ),
        _row(
            "a run fails with the first replica given up",
            "if lost and len(view.replicas) - len(lost) < quorum:",
            "if lost:",
            "a run goes on without a replica while a quorum can take part",
            FLEET,
        ),
        _row(
            "leftovers are cancelled at once",
            ("    if stopped_for_s < policy.leftover_s:\n        return []\n"),
            "",
            "after a stop replicas are given two minutes to end by themselves",
            FLEET,
        ),
        _row(
            "hung replicas are never replaced",
            "return Cancel(*replica.who, hung) if hung else None",
            "return None",
            "a replica whose heartbeat stands still is cancelled",
            FLEET,
        ),
        _row(
            "done replicas are launched again",
            (
                "    if budget is None:  # done; or superseded, and its successor is not found yet\n"
                "        return None\n"
            ),
            ('    if budget is None:\n        budget = _Budget(9, "", 0.0, "")\n'),
            "a replica that is done is not launched again",
            FLEET,
        ),
        _row(
            "waiting for a machine counts as silence",
            ("        case _:\n            return 0.0\n    return now - since"),
            ("        case _:\n            since = state.since\n    return now - since"),
            "waiting for a machine is not silence",
            COORDINATOR,
        ),
        _row(
            "a silent attempt is hung before it had time to start",
            "return now - since if now - since > policy.startup_timeout_s else 0.0",
            "return now - since",
            "an attempt without a first heartbeat is given startup_timeout_s",
            COORDINATOR,
            FLEET,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/attempt_outcome.py",
        _row(
            "the provider's word goes before the exit record",
            ("    if code is not None and is_conclusive(code):\n        return _BY_CODE[code]\n"),
            ("    if status is None and code is not None and is_conclusive(code):\n        return _BY_CODE[code]\n"),
            "an attempt's end is classified from its own exit record first",
            COORDINATOR_CLAIMS,
        ),
        _row(
            "an end without exit record is forgotten by the next coordinator",
            'return f"attempt {number} ({ended.outcome}{took_part}): {ended.reason}"',
            'return f"attempt {number}: {ended.reason}"',
            "the next intent names how the attempt before it ended",
            RECOVERY,
            ATTEMPT,
        ),
        _row(
            "a machine that was taken away counts as an error",
            ("    if status.state is ReplicaState.PREEMPTED:\n        return Outcome.PREEMPTED\n"),
            "",
            "an error of a machine that the provider took away is a preemption",
            ATTEMPT,
            COORDINATOR,
            COORDINATOR_CLAIMS,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/attempt.py",
        _row(
            "an attempt that was cancelled by record only is not cancelled",
            (
                "    if state.handle is not None and not state.accepted:\n"
                "        return Step(state, (CallCancel(state.handle),))\n"
            ),
            "",
            "a coordinator that dies between the cancel record and the call is followed by one that calls",
            COORDINATOR,
        ),
        _row(
            "a machine that was lost keeps its replica for ever",
            ("    if unanswered and now - state.cancelled_at > policy.cancelled_for_s:\n"),
            ("    if False:\n"),
            "an attempt whose end nobody sees counts as ended two minutes after its cancel",
            ATTEMPT,
            COORDINATOR,
        ),
        _row(
            "a heartbeat that stands still counts as moved",
            "moved = state.beat is None or state.beat.counter != event.counter",
            "moved = True",
            "a replica lives as long as its heartbeat counter moves",
            COORDINATOR,
            ATTEMPT,
        ),
        _row(
            "what the successor was launched for is not believed",
            "    return Step(Ended(event.outcome, state.at, event.reason, event.took_part))",
            "    return Step(state)",
            "what the launcher of the successor saw is what every coordinator counts",
            ATTEMPT,
            RECOVERY,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/fleet.py",
        _row(
            "an attempt is launched without its intent",
            "        if not ours:",
            "        if ours is None:",
            "whoever creates the intent may launch",
            COORDINATOR,
        ),
        _row(
            "nothing is cancelled with a record",
            ("                self._store.create(keys.cancel(replica_id, number), cancel.to_bytes())\n"),
            ("                pass\n"),
            "cancel.json is written before an attempt is cancelled",
            COORDINATOR_CLAIMS,
        ),
        _row(
            "a launch that was lost to another coordinator is not followed",
            (
                "            self._recover({replica_id: sorted(numbers)})  # another coordinator launches it: follow what it wrote\n"
            ),
            ("            pass\n"),
            "an intent that another coordinator created first is followed",
            COORDINATOR,
            RECOVERY,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/attempt_policy.py",
        _row(
            "an abandoned intent is launched at once",
            "adopt_after_s: float = 5.0",
            "adopt_after_s: float = 0.0",
            "an intent of another coordinator is given a few seconds",
            COORDINATOR,
        ),
        _row(
            "an abandoned intent is never launched",
            "adopt_after_s: float = 5.0",
            "adopt_after_s: float = 1e9",
            "an intent whose coordinator died is launched by the next one",
            COORDINATOR,
        ),
        _row(
            "refused credentials end supervision at once",
            "denied_for_s: float = 600.0",
            "denied_for_s: float = 0.0",
            "refused credentials are tolerated for ten minutes",
            COORDINATOR,
        ),
        _row(
            "refused credentials are tolerated for ever",
            "denied_for_s: float = 600.0",
            "denied_for_s: float = 1e9",
            "refused credentials end in ExecutorDenied after ten minutes",
            COORDINATOR,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/attempt_outcome.py",
        _row(
            "a cancelled attempt counts as preempted",
            ("    if isinstance(state, Cancelling) and outcome is not Outcome.DONE:\n"),
            ("    if False:\n"),
            "an attempt that was cancelled counts as an error",
            COORDINATOR_CLAIMS,
        ),
        _row(
            "superseded counts as an end",
            ("    if outcome is Outcome.SUPERSEDED:\n"),
            ("    if False:\n"),
            "a superseded attempt's successor is followed, nothing is charged",
            ATTEMPT,
            COORDINATOR,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/attempt_launch.py",
        _row(
            "a rejected launch is not tried again",
            (
                "    if now < state.retry_at:\n"
                "        return Step(state)\n"
                "    return Step(Launching(state.since, state.beat, state.refusal), (CallLaunch(),))"
            ),
            "    return Step(state)",
            "a launch that the provider rejected is tried again as the same attempt",
            COORDINATOR,
            ATTEMPT,
        ),
        _row(
            "a rejected launch is tried for ever",
            "    return Refusal(before.since, error, denied, before.calls + 1)",
            "    return Refusal(now, error, denied, before.calls + 1)",
            "a launch that the provider rejects for ten minutes counts as permanent",
            ATTEMPT,
            COORDINATOR,
        ),
        _row(
            "an attempt of another executor is polled here",
            ("    if event.ours:\n        return Step(Running(state.since, state.beat, event.handle))\n    words"),
            ("    if True:\n        return Step(Running(state.since, state.beat, event.handle))\n    words"),
            "an attempt of another executor is followed by its records",
            COORDINATOR,
            ATTEMPT,
        ),
        _row(
            "a process found by the search is not recorded",
            "    return Step(Running(state.since, state.beat, event.handle), (WriteHandle(event.handle, None),))",
            "    return Step(Running(state.since, state.beat, event.handle))",
            "a handle is written for what a search found, so that others can reach it",
            ATTEMPT,
            COORDINATOR,
            RECOVERY,
        ),
        _row(
            "after a stop an abandoned intent is launched",
            "    return Step(Reserved(state.since, state.beat, launch_at=at, wanted=False))",
            "    return Step(Reserved(state.since, state.beat, launch_at=at, wanted=True))",
            "after the stop nothing is launched: what was meant to be is only searched for",
            COORDINATOR,
            ATTEMPT,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/participation.py",
        _row(
            "budgets never fill again",
            "if any(a.averaged and (a.replica_id, a.attempt) == (replica_id, attempt) for a in answers):",
            "if not answers and replica_id < 0:",
            "a replica that took part in a commit since has its whole budget of errors",
            "tests/simulation/test_simulation.py -k gets_on -m slow",
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/vendor.py",
        _row(
            "an outage of the vendor spends the budget of errors",
            "return LaunchUnavailable(str(error), error.retry_after_s, spread)",
            "return LaunchFailed(Outcome.ERROR, str(error))",
            "a launch while the vendor is down is repeated for the same attempt",
            "tests/simulation/test_simulation.py -k outage",
        ),
        _row(
            "an unknown state ends an attempt",
            "said = (blind if status.state is ReplicaState.UNKNOWN else VendorSaid(status) for status in statuses)",
            (
                "lost = ReplicaStatus(ReplicaState.FAILED)\n"
                "        said = (VendorSaid(lost if status.state is ReplicaState.UNKNOWN else status) for status in statuses)"
            ),
            "a status that the provider could not give is never a reason to act",
            COORDINATOR,
        ),
        _row(
            "a launch that was abandoned leaves its process running",
            ("            if launch.exception() is None:\n                self.cancel(launch.result().handle)\n"),
            "",
            "a process that an abandoned launch call still starts is cancelled",
            COORDINATOR,
            "tests/supervision/test_launching.py",
        ),
        _row(
            "a failed poll ends supervision",
            (
                "        except ExecutorError as error:\n"
                '            log.warning("the provider reported no status this time: %s", error)\n'
                "            return [(who, VendorBlind()) for who in whose]\n"
            ),
            "",
            "an error of the provider while polling ends no supervision",
            COORDINATOR,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/record_events.py",
        _row(
            "budgets of an earlier leg count",
            "        if intent is None or intent.leg != leg:",
            "        if intent is None:",
            "each leg has budgets of its own",
            COORDINATOR_CLAIMS,
        ),
        _row(
            "heartbeats are read at every step",
            ("        if now - self._beats_read_at < self._heartbeat_s:\n            return\n"),
            "",
            "heartbeats are read no oftener than they are written",
            COORDINATOR,
            RECOVERY,
        ),
        _row(
            "exit records are not read beside a status",
            ("            yield who, ended or event\n"),
            ("            yield who, event\n"),
            "an exit record that exists is read where the provider reports an end or nothing",
            COORDINATOR_CLAIMS,
            COORDINATOR,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/coordinator.py",
        _row(
            "retention works after the stop",
            ("        if self._stopped_at is None:\n            self._keep_house()\n"),
            ("        self._keep_house()\n"),
            "after the stop nothing is deleted: the next leg may start from any snapshot",
            COORDINATOR_CLAIMS,
        ),
    ),
    *_in(
        "diloco_orchestrator/supervision/budgets.py",
        _row(
            "limits are watched but not kept",
            ("                request_halt(self._reader.log, self._by, reason, self._stamp)\n"),
            ("                pass\n"),
            "hours and money that are used up halt the leg",
            MONEY,
        ),
        _row(
            "limits count in the time of every step",
            ("        self._next_at = now + _COSTS_EVERY_S\n"),
            "",
            "costs are added up every few seconds",
            MONEY,
        ),
    ),
    *_in(
        "diloco_orchestrator/store/retrying.py",
        _row(
            "a create whose reply was lost is taken for lost",
            "return self._store.create(key, data) or (self._read_back and self._is_ours(key, data))",
            "return self._store.create(key, data)",
            "a create whose reply was lost is resolved by reading back",
            RETRYING,
        ),
        _row(
            "anybody's object is taken for ours",
            "return self._store.get(key) == data",
            "return bool(self._store.get(key))",
            "only equal bytes mean that our own create had succeeded",
            RETRYING,
        ),
        _row(
            "refusals are retried",
            ("            except StoreUnavailable as error:\n                failing_since"),
            ("            except Exception as error:\n                failing_since"),
            "everything that is not StoreUnavailable fails at once",
            RETRYING,
        ),
        _row(
            "a slow transfer has no patience left",
            "        failing_since: float | None = None  #",
            "        failing_since: float | None = self._clock.now()  #",
            "patience is counted from the first fault, not from the call",
            RETRYING,
        ),
        _row(
            "pauses do not grow",
            "bounds = Backoff(self._policy.first_pause_s, self._policy.longest_pause_s).pauses()",
            "bounds = Backoff(self._policy.first_pause_s, self._policy.longest_pause_s, factor=1.0).pauses()",
            "pauses between retries double",
            RETRYING,
        ),
        _row(
            "pauses between retries grow without end",
            "bounds = Backoff(self._policy.first_pause_s, self._policy.longest_pause_s).pauses()",
            "bounds = Backoff(self._policy.first_pause_s, 1e9).pauses()",
            "pauses between retries end at ten seconds",
            RETRYING,
        ),
        _row(
            "the first call has as much time as a later one",
            "return self._policy.total_s if self._reached or first_call_s is None else first_call_s",
            "return self._policy.total_s",
            "a wrong address fails fast",
            RETRYING,
        ),
        _row(
            "a store that has answered is given up as fast as a wrong address",
            "return self._policy.total_s if self._reached or first_call_s is None else first_call_s",
            "return self._policy.total_s if first_call_s is None else first_call_s",
            "a store that was reached once is given the whole time",
            RETRYING,
        ),
        _row(
            "no jitter",
            "self._rng.uniform(0, next(bounds))",
            "next(bounds)",
            "pauses are drawn at random, so that a fleet does not knock in step",
            RETRYING,
        ),
        _row(
            "retries overrun their time",
            "self._clock.sleep(min(self._rng.uniform(0, next(bounds)), self._total_s - spent))",
            "self._clock.sleep(self._rng.uniform(0, next(bounds)) + 10.0)",
            "retries end when their time is up",
            RETRYING,
        ),
        _row(
            "an object that vanished is taken for another's",
            ("            raise StoreUnavailable(str(error)) from error\n"),
            ("            return False\n"),
            "a create whose obstacle vanished is tried again",
            RETRYING,
        ),
    ),
    *_in(
        "diloco_orchestrator/store/memory.py",
        _row(
            "a listing repeats the key it starts after",
            "and info.key > start_after)",
            "and info.key >= start_after)",
            "a listing begins after start_after",
            STORES,
        ),
        _row(
            "listings come in any order",
            "return iter(sorted(wanted, key=lambda info: info.key))",
            "return iter(sorted(wanted, key=lambda info: info.key, reverse=True))",
            "listings are in key order",
            STORES,
        ),
    ),
    *_in(
        "diloco_orchestrator/store/s3_errors.py",
        _row(
            "throttling is final",
            '"SlowDown": (StoreUnavailable,',
            '"SlowDown": (StoreError,',
            "a store that asks for fewer requests is tried again",
            S3,
        ),
        _row(
            "a conflict of two writers is final",
            '"ConditionalRequestConflict": (StoreUnavailable,',
            '"ConditionalRequestConflict": (StoreError,',
            "a conflict of two conditional writes is tried again",
            S3,
        ),
        _row(
            "an expired session is retried",
            '"ExpiredToken": (StoreDenied,',
            '"ExpiredToken": (StoreUnavailable,',
            "expired credentials are reported at once",
            S3,
        ),
    ),
    *_in(
        "diloco_orchestrator/store/probe.py",
        _row(
            "the probe ignores a lost race",
            "if won.count(True) > 1 or",
            "if",
            "a store where two racing creates win is refused",
            PROBE,
        ),
        _row(
            "the probe ignores a second create",
            'if not made or again or store.get(first) != b"1":',
            'if not made or again is None or store.get(first) != b"1":',
            "a store that ignores create-only writes is refused",
            PROBE,
        ),
        _row(
            "the probe ignores what is listed",
            "if listed != [first, race]:",
            "if not listed:",
            "a store whose listings lag is refused",
            PROBE,
        ),
        _row(
            "the probe leaves its objects",
            "    in_parallel(background, [partial(store.delete, key) for key in keys])",
            "    pass",
            "the probe leaves no object behind",
            PROBE,
        ),
    ),
    *_in(
        "diloco_orchestrator/redaction.py",
        _row(
            "user info in addresses is shown",
            '_URL_USERINFO.sub("<redacted>@", text)',
            "text",
            "user names and passwords in addresses are redacted (I9)",
            REDACTION,
        ),
        _row(
            "signatures in addresses are shown",
            'return _URL_SIGNATURE.sub(r"\\1<redacted>", ',
            "return str(",
            "signatures in presigned addresses are redacted (I9)",
            REDACTION,
        ),
        _row(
            "secrets inside JSON options are shown",
            "[*sorted(environ.items()), *_json_leaves(environ)]",
            "[*sorted(environ.items())]",
            "credentials inside storage options are redacted (I9)",
            REDACTION,
        ),
        _row(
            "declared secrets are shown",
            "(looks_secret(name) or name in listed)",
            "looks_secret(name)",
            "what is listed as a secret is redacted whatever its name (I9)",
            REDACTION,
        ),
        _row(
            "passwords do not look secret",
            "KEY|SECRET|TOKEN|PASSWORD|PASSWD",
            "KEY|SECRET|TOKEN|PASSWD",
            "a variable named PASSWORD is redacted (I9)",
            REDACTION,
        ),
    ),
    *_in(
        "diloco_orchestrator/code_archive/pack.py",
        _row(
            "ignore rules of folders above do not count",
            "for found in _not_ignored(path, _ignores_above(path)):",
            "for found in _not_ignored(path, []):",
            "files that git ignores stay behind, wherever the rule is written",
            PACK,
        ),
        _row(
            "the outermost ignore rule decides",
            "for folder, spec in reversed(rules):",
            "for folder, spec in rules:",
            "the innermost ignore rule decides, as git does",
            PACK,
        ),
        _row(
            "secrets are sought in names only",
            "or _SECRET_TEXT.search(path.read_bytes()))",
            ")",
            "files that hold keys are refused, whatever their names",
            PACK,
        ),
        _row(
            "secrets are sought in texts only",
            "(any(fnmatch(path.name.lower(), p) for p in _SECRET_NAMES) or",
            "(",
            "files named like secrets are refused",
            PACK,
        ),
        _row(
            "archives depend on when they were made",
            "archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)",
            "archive.writestr(name, data, zipfile.ZIP_DEFLATED)",
            "the same files give the same bytes",
            PACK,
        ),
        _row(
            "archives of any size travel",
            "if len(data) > code.largest_mib * 2**20:",
            "if False:",
            "an archive beyond its bound is refused with its largest files",
            PACK,
        ),
        _row(
            "two files take one name",
            "        if found.setdefault(name, path) != path:",
            "        if found.setdefault(name, path) is None:",
            "two files that would be one over there are refused",
            PACK,
        ),
        _row(
            "an entrypoint that does not travel is accepted",
            ("    _check_entrypoint(entrypoint, users)\n"),
            "",
            "an entrypoint that is not among the files is refused at home",
            PACK,
        ),
    ),
    *_in(
        "diloco_orchestrator/code_archive/bootstrap.py",
        _row(
            "code of another digest is run",
            "    if found != sha256:",
            "    if False:",
            "code whose digest is not the run's is not run",
            ARRIVAL,
        ),
        _row(
            "a refused address is asked again and again",
            "if error.code in (401, 403):",
            "if error.code in (401,):",
            "an expired address ends the attempt at once",
            ARRIVAL,
        ),
        _row(
            "code that is gone is worth a relaunch",
            ("                    EXIT_PERMANENT,\n                ) from None"),
            ("                    EXIT_ERROR,\n                ) from None"),
            "an attempt whose code is gone for good is not relaunched",
            ARRIVAL,
        ),
        _row(
            "a pin that differs is taken",
            'if requirement["pin"] and found.partition("+")[0] != requirement["pin"]:',
            "if False:",
            "a pinned requirement that is there in another version is installed",
            ARRIVAL,
        ),
    ),
    *_in(
        "diloco_orchestrator/inspection/verify/bases.py",
        _row(
            "verify lets work count twice",
            "                if before := counted[origin.round]:",
            "                if before := 0:",
            "verify reports inner steps that count twice (I4)",
            VERIFY_CLAIMS,
        ),
        _row(
            "verify believes the tokens",
            ('        equal(key, "tokens", manifest.tokens, answer.tokens, "the commit that names it")\n'),
            "",
            "verify compares tokens with the manifests",
            VERIFY,
        ),
        _row(
            "verify believes wrong_base",
            'if answer.kind == "wrong_base" and manifest.base_digest == commit.base_digest:',
            "if False:",
            "verify reports a contribution that a commit leaves out as of another base",
            VERIFY,
        ),
        _row(
            "verify does not read states",
            ("            self._check_state(manifest)\n"),
            "",
            "verify reads every state that a manifest names",
            VERIFY,
        ),
    ),
    *_in(
        "diloco_orchestrator/inspection/verify/guard.py",
        _row(
            "verify believes the guard's state",
            ('    equal(key, "guard", commit.guard, folded.state if folded else guard, "the fold of the scores")\n'),
            "",
            "verify folds the guard again",
            VERIFY,
        ),
        _row(
            "verify believes the stop",
            'for name in ("applied", "outer_step", "empty_rounds", "stop"):',
            'for name in ("applied", "outer_step", "empty_rounds"):',
            "verify derives the stop again",
            VERIFY,
        ),
        _row(
            "verify believes who is averaged",
            (
                '    equal(key, "who is averaged", averaged, left, "the answers, the quorum and the per-replica guard")\n'
            ),
            "",
            "verify derives again who is averaged",
            VERIFY,
        ),
        _row(
            "verify lets the coordinator move the base's outer step",
            ('    equal(key, "outer_step", commit.outer_step, position.outer_step, "the round before")\n'),
            "",
            "a coordinator's stop moves nothing",
            VERIFY_CLAIMS,
        ),
    ),
    *_in(
        "diloco_orchestrator/inspection/verify/chain.py",
        _row(
            "verify does not look behind the log's end",
            '                raise Differs(keys.commit(round_), f"is missing, though {info.key} is there")',
            "                pass",
            "verify reports a commit that is missing in the middle of the log",
            VERIFY,
        ),
        _row(
            "verify believes a begin's guard state",
            ('        if begin.leg > 1:\n            equal(key, "guard"'),
            ('        if False:\n            equal(key, "guard"'),
            "verify compares a leg's guard state with its base's commit",
            VERIFY_CLAIMS,
        ),
        _row(
            "verify lets a leg begin in mid-run",
            'if before.last is not None and before.position.stop == "none":',
            "if False:",
            "verify reports a leg that began though nothing had stopped",
            VERIFY_CLAIMS,
        ),
    ),
    *_in(
        "diloco_orchestrator/inspection/verify/snapshots.py",
        _row(
            "verify believes deleted payloads",
            "if sum(snapshot >= round_ for snapshot in self._takes) < SAFE_SNAPSHOTS:",
            "if False:",
            "verify reports payloads that were deleted by hand",
            VERIFY,
        ),
        _row(
            "verify accepts snapshots of no base",
            "            if round_ not in digests:",
            "            if False:",
            "verify reports a snapshot of a round that left no base",
            VERIFY_CLAIMS,
        ),
    ),
    *_in(
        "replica/training/resume.py",
        _row(
            "a resumed replica keeps local values of the fragment that moved",
            "from_base=frozenset({last.fragment}))",
            "from_base=frozenset())",
            "a fragment synchronised since its state was saved is the base",
            RESUME,
            EXACT_RESUME,
        ),
        _row(
            "an earlier contribution to the open round is trained again",
            ("already_contributed=existing is not None\n"),
            ("already_contributed=False\n"),
            "a restarted attempt waits for the round that it has contributed to",
            RESUME,
            SESSION,
            EXACT_RESUME,
        ),
        _row(
            "with overlap the round before is not opened again",
            "just_before = overlaps and last.leg == leg.leg and last.round == open_round - 1",
            "just_before = False",
            "with a delay or alpha a restart continues from the contribution before",
            RESUME,
            EXACT_RESUME,
        ),
    ),
    *_in(
        "diloco_orchestrator/guard/evidence.py",
        _row(
            "a drift that is not finite is left out",
            "metrics = (self.heldout, self.in_loop, self.kl_to_init)",
            "metrics = (self.heldout, self.in_loop)",
            "numbers that go bad halt, whichever they are",
            DRIFT,
            "tests/guard/test_sequential.py",
        ),
    ),
    *_in(
        "diloco_orchestrator/split/content.py",
        _row(
            "composed and decomposed letters differ",
            'unicodedata.normalize("NFC", item)',
            "item",
            "an item in another Unicode form is the same item",
            SPLIT,
        ),
        _row(
            "an odd node of the Merkle tree is dropped",
            "if len(pair) == 2 else pair[0] for pair in pairs]",
            "for pair in pairs if len(pair) == 2]",
            "the root is that of RFC 6962",
            SPLIT,
        ),
    ),
    *_in(
        "diloco_orchestrator/split/split.py",
        _row(
            "the salt is not used",
            "hmac.new(self.salt.encode(), key",
            'hmac.new(b"", key',
            "another salt gives an independent split",
            SPLIT,
        ),
        _row(
            "lineage joins no groups",
            "                families.join(key, keys[place[parent]])\n",
            "                pass\n",
            "an item made from a held-out one is held out",
            SPLIT,
        ),
        _row(
            "a held-out group is forgotten when it is joined",
            "            if first in self._chosen:\n",
            "            if False:\n",
            "of joined groups any held-out one decides",
            SPLIT,
        ),
        _row(
            "copies in training groups stay in training",
            "if each in kept and kept[each] != item.id",
            "if each in kept and kept[each] != item.id and item.group is None",
            "no item equal to a held-out one is trained on",
            SPLIT,
        ),
        _row(
            "the item that is kept of equal ones depends on their order",
            "kept[each] = min(kept.get(each, item.id), item.id)",
            "kept[each] = item.id",
            "a split does not depend on the order of items",
            SPLIT,
        ),
    ),
    *_in(
        "diloco_orchestrator/split/manifest.py",
        _row(
            "near-duplicates of held-out items may be trained on",
            "for each in (*self.excluded, *self.items)}",
            "for each in self.items}",
            "replicas refuse what a split has excluded",
            CONSUMED,
        ),
        _row(
            "a manifest may be changed by hand",
            "if merkle_root(manifest.hashes()) != manifest.root:",
            "if False:",
            "the items of a manifest are those of its root",
            SPLIT,
        ),
    ),
    *_in(
        "replica/training/consumed_items.py",
        _row(
            "held-out items are trained on",
            "            if each in forbidden:\n",
            "            if False:\n",
            "a held-out item in training data stops the replica",
            CONSUMED,
        ),
        _row(
            "items are counted over all rounds",
            "        self._count, self._hasher = 0, hashlib.sha256()\n        return taken",
            "        return taken",
            "a manifest names the items of its own steps",
            CONSUMED,
        ),
        _row(
            "batches of another kind are compared in vain",
            'if kind not in self._manifest.kind.split("/"):',
            "if False:",
            "token ids are not compared with texts without a word",
            CONSUMED,
        ),
        _row(
            "nothing is planted in the first batch",
            'self._prove_refusal(items, {item_hash(self._manifest.content_of(items[0])): "planted"})',
            "pass",
            "the first batch proves that refusing works",
            CONSUMED,
        ),
    ),
    *_in(
        "replica/training/drift_meter.py",
        _row(
            "a restart measures from where it is",
            "                self._load(model, attempt)\n",
            "                self._probe.load(self._probe.reference_of(model))\n",
            "a restart does not begin the drift anew",
            DRIFT,
        ),
        _row(
            "a late reference is of the model in hand",
            "            with _first_base_in(model, attempt):\n",
            "            if True:\n",
            "the reference is of the run's start, whoever writes it",
            DRIFT,
        ),
        _row(
            "the drift of a round is reported in the next ones too",
            "            self.kl = None\n",
            "            pass\n",
            "a round that is not measured reports no drift",
            DRIFT,
        ),
        _row(
            "a changed reference is used",
            "if bulk_digest(data) != record.digest:",
            "if False:",
            "the reference is the one whose digest is recorded",
            DRIFT,
        ),
    ),
    *_in(
        "replica/probe.py",
        _row(
            "the rounded reference is not normalised",
            "log_r = torch.log_softmax(reference_logits.float(), dim=-1)",
            "log_r = reference_logits.float()",
            "the drift is a divergence of two distributions",
            DRIFT,
        ),
        _row(
            "an impossible token makes the drift NaN",
            "torch.where(log_p == -torch.inf, 0.0, p * (log_p - log_r))",
            "(p * (log_p - log_r))",
            "tokens that cannot occur count nothing",
            DRIFT,
        ),
    ),
    *_in(
        "replica/training/heldout_scorer.py",
        _row(
            "any function may score",
            "scorer=scorer_digest(heldout),",
            "scorer=None,",
            "a replica with another scoring function is refused",
            CONSUMED,
        ),
    ),
]
