"""The store: records whole or absent, one claim a run, nothing deleted, nothing fatal."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest

import sandbox as sb
from sandbox.records.claims import place
from sandbox.records.files import record_path
from sandbox.records.record import RunRecord
from sandbox.records.store import Store

BASE = sb.RunConfig(device="cpu", dtype="float32", context=8)
NAME = "0123456789abcdef"


def record_of(run=BASE, status="failed"):
    return RunRecord(config=run, hash=run.hash, status=status, error="because")


@pytest.fixture
def store(tmp_path):
    (tmp_path / NAME).mkdir()
    return Store(tmp_path)


def files(store):
    return sorted(path.name for path in store.room(NAME).iterdir())


def age(store, seconds):
    past = time.time() - seconds
    os.utime(store.room(NAME) / "claim", (past, past))


def test_a_record_lies_in_its_runs_folder(tmp_path):
    store, record = Store(tmp_path), record_of()
    assert store.load(record.hash) is None
    assert store.save(record) == tmp_path / record.hash / "record.json"
    assert store.load(record.hash).to_dict() == record.to_dict()
    assert [r.hash for r in store.records()] == [record.hash]


def test_stores_of_one_file_a_run_are_still_read(tmp_path):
    store, old = Store(tmp_path), record_of(status="diverged")
    (tmp_path / f"{old.hash}.json").write_text(old.line())
    assert store.load(old.hash).status == "diverged"
    assert [r.hash for r in sb.load_records(tmp_path)] == [old.hash]
    store.save(record_of())
    assert [r.status for r in store.records()] == ["failed"]  # the newer layout is the newer record
    assert (tmp_path / f"{old.hash}.json").exists()


@pytest.mark.parametrize("old", [False, True], ids=["folder a run", "file a run"])
@pytest.mark.parametrize(
    "content",
    [
        '{"schema": 1, "config": {',
        '{"schema": 99}',
        "[]",
        "",
        "\x00" * 100,
        "[" * 100_000,
        record_of(replace(BASE, seed=7)).line(),
        record_of().line().replace('"failed"', '"fine"'),
        record_of().line().replace('"failed"', '"finished"'),
    ],
    ids=["cut off", "newer", "a list", "empty", "zeros", "deep", "another run's", "no status", "finished with no loss"],
)
def test_what_cannot_be_read_is_put_aside_whole_and_passed_over(tmp_path, capsys, content, old):
    store, good = Store(tmp_path), record_of(replace(BASE, seed=1))
    store.save(good)
    path = tmp_path / f"{BASE.hash}.json" if old else record_path(tmp_path, BASE.hash)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    assert [r.hash for r in sb.load_records(tmp_path)] == [good.hash]
    (aside,) = tmp_path.rglob("*.unreadable-*")
    assert aside.read_text() == content
    assert aside.name in capsys.readouterr().err
    assert [r.hash for r in sb.load_records(tmp_path)] == [good.hash]
    assert capsys.readouterr().err == ""  # said once


def test_one_claim_holds_at_a_time(store):
    first = store.claim(NAME, "first")
    assert first.mine()
    assert store.held(NAME)
    assert store.claim(NAME, "second") is None
    first.release()
    assert not store.held(NAME)
    assert files(store) == []
    assert store.claim(NAME, "second").mine()
    assert files(store) == ["claim"]


def test_of_many_that_claim_at_once_one_succeeds(tmp_path):
    for attempt in range(40):
        store, name, won = Store(tmp_path), f"{attempt:016x}", []
        store.room(name).mkdir()
        if attempt % 2:  # a void claim of a process that is gone: all want to take over
            dead = {"token": "dead", "place": place(), "pid": 2**22 + 1, "started": None}
            (store.room(name) / "claim").write_text(json.dumps(dead))
        gate = threading.Barrier(8)

        def claim(token, store=store, name=name, won=won, gate=gate):
            gate.wait()
            if store.claim(name, token) is not None:
                won.append(token)

        threads = [threading.Thread(target=claim, args=(f"{attempt}-{i}",)) for i in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(won) == 1
        assert store.holds(name, won[0])
        assert [p.name for p in store.room(name).iterdir()] == ["claim"]


def test_a_claim_that_is_touched_holds_and_one_that_is_not_is_void(store):
    first = store.claim(NAME, "first")
    age(store, store.expiry + 5)
    first.touch({"step": 3})
    assert store.progress(NAME) == {"step": 3}
    assert store.claim(NAME, "second") is None
    age(store, store.expiry + 5)
    assert not store.held(NAME)
    assert store.claim(NAME, "second").mine()
    assert not first.mine()
    first.release()  # too late: it is the second's
    assert store.holds(NAME, "second")


def test_a_claim_of_another_place_holds_until_it_expires(store):
    (store.room(NAME) / "claim").write_text(json.dumps({"token": "far", "place": "a node", "pid": 1, "started": "1"}))
    assert store.held(NAME)
    assert store.claim(NAME, "near") is None
    age(store, store.expiry + 5)
    assert store.claim(NAME, "near").mine()


def test_a_claim_that_was_cut_off_holds_until_it_expires(store):
    (store.room(NAME) / "claim").write_text("")
    assert store.claim(NAME, "near") is None
    age(store, store.expiry + 5)
    assert store.claim(NAME, "near").mine()


def test_a_claim_of_a_process_that_died_here_is_void_at_once(store):
    take = f"Store({str(store.folder)!r}).claim({NAME!r}, 'gone')"
    code = f"import os; from sandbox.records import Store; {take}; os._exit(1)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert store.holds(NAME, "gone")
    assert not store.held(NAME)
    assert store.claim(NAME, "next").mine()


def test_a_claim_of_a_process_that_lives_here_holds(store):
    code = f"""
        from sandbox.records.store import Store
        Store({str(store.folder)!r}).claim({NAME!r}, "other")
        print("claimed", flush=True)
        input()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], **pipes) as other:
        assert other.stdout.readline() == "claimed\n"
        assert store.held(NAME)
        assert store.claim(NAME, "mine") is None
        other.communicate("\n")
    assert store.claim(NAME, "mine").mine()


def test_a_file_system_without_links_has_exclusive_claims_too(store, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert store.claim(NAME, "first").mine()
    assert store.claim(NAME, "second") is None


def test_a_stop_reaches_only_the_claim_that_it_names(store):
    store.stop(NAME, "another")
    claim = store.claim(NAME, "one")
    assert not claim.stopped()
    store.stop(NAME, "one")
    assert claim.stopped()
    claim.release()
    assert files(store) == ["stop-another"]


def test_a_store_that_is_not_there_holds_nothing(tmp_path):
    store = Store(tmp_path / "nowhere")
    assert (store.records(), store.load(NAME), store.held(NAME), store.version(NAME)) == ([], None, False, None)
    with pytest.raises(OSError, match="nowhere"):
        store.claim(NAME, "token")
