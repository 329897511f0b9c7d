"""From a corpus to batches: the text, its split, tokenizers without loss, shards, the pure stream, the refusals."""

import dataclasses
import hashlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandbox import data
from sandbox.config import DataConfig
from sandbox.data import corpus, shards
from sandbox.data import tokens as room
from sandbox.data.tokenizer import bpe_tokenizer, byte_tokenizer, train_bpe

PROSE = "".join(f"Line {i}: the quick brown fox — déjà vu — jumps over {i % 7} lazy dogs.\n" for i in range(1000))
ODD = "\u2581 \u2581\u2581  \u2400\u2585<unk></s><0x0A>\t \r\n\n\x0b\x85\u2028\ufeff \U0001f600e\u0301\ufffd  "


@pytest.fixture(scope="module")
def bpe():
    return bpe_tokenizer(train_bpe(PROSE.encode(), 400))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give each test a cache directory of its own, and none of what earlier ones loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    room._load.cache_clear()
    return tmp_path / "cache" / "dion-sandbox"


@pytest.fixture
def prose(tmp_path):
    """Return the configuration of a small text file."""
    (tmp_path / "prose.txt").write_text(PROSE, encoding="utf-8")
    return DataConfig(corpus=str(tmp_path / "prose.txt"), vocab_size=400)


def write_shard(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids, "<u2").tobytes())
    return path


@pytest.fixture
def binary(tmp_path):
    """Return the configuration of three training shards (ids 0 to 599 in order) and one of validation."""
    folder = tmp_path / "bins"
    folder.mkdir()
    for i, (low, high) in enumerate([(0, 100), (100, 103), (103, 600)]):
        write_shard(folder / f"web_train_{i:06}.bin", np.arange(low, high))
    write_shard(folder / "web_val_000000.bin", np.arange(200))
    return DataConfig(corpus=str(folder))


# Text in


def test_the_king_james_text_is_the_known_one():
    text = corpus.read("kjv")
    assert len(text) == 4_141_878
    assert text.startswith(b"Adam, Sheth, Enosh,")  # 1 Chronicles is the first by file name
    assert b"\n\nIn the beginning God created the heaven and the earth.\nAnd the earth" in text


def test_another_king_james_text_is_refused(tmp_path):
    (tmp_path / "Genesis.json").write_text('{"1": {"1": "In the beginning."}}')
    with pytest.raises(ValueError, match=f"expected is {corpus.KJV_SHA256}"):
        corpus.NAMED["kjv"]([tmp_path / "Genesis.json"])


def test_the_standard_library_is_code_without_tests():
    names = [path.name for path in corpus.files("stdlib")]
    assert {"argparse.py", "dataclasses.py"} <= set(names)
    assert not [name for name in names if name.startswith("_sysconfigdata")]
    assert len({path.parent for path in corpus.files("stdlib")}) == 1  # no package, so no test, idlelib, site-packages
    assert corpus.read("stdlib") == corpus.read("stdlib")


def test_a_folder_is_its_visible_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"c.txt": "third", "a.txt": "first", "b/x.txt": "second", ".git/y": "no", ".z": "no"}.items():
        (tmp_path / name).write_text(text)
    assert corpus.read(str(tmp_path)) == b"first\nsecond\nthird"


def test_carriage_returns_stay(tmp_path):
    (tmp_path / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    assert corpus.read(str(tmp_path / "dos.txt")) == b"one\r\ntwo\r\n"


# Split


def test_blocks_end_at_the_next_newline_after_4_kib_and_every_tenth_is_validation():
    train, val = corpus.split(PROSE.encode())
    blocks = [val[i // 10] if i % 10 == 0 else train[i - i // 10 - 1] for i in range(len(train) + len(val))]
    assert b"".join(blocks) == PROSE.encode()
    assert len(val) == math.ceil(len(blocks) / 10)
    for block in blocks[:-1]:
        assert block.endswith(b"\n")
        assert block.find(b"\n", 4095) == len(block) - 1


def test_a_line_that_ends_with_the_block_ends_it():
    train, val = corpus.split((b"x" * 63 + b"\n") * 640)
    assert {len(block) for block in train + val} == {4096}


@given(st.lists(st.sampled_from(["日本" * 900, "x" * 70_000, "é\n", "\n"]), max_size=12).map("".join))
def test_a_split_loses_nothing_and_cuts_no_character(text):
    train, val = corpus.split(text.encode())
    assert sorted(b"".join(train + val)) == sorted(text.encode())
    assert sorted("".join(block.decode() for block in train + val)) == sorted(text)


def test_text_without_newlines_has_a_validation_split_too():
    train, val = corpus.split(b"word " * 20_000)
    assert (len(train), len(val)) == (22, 3)


# Tokenizers


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.sampled_from(ODD)))
@example(ODD)
@example("\x00 \x00")
def test_decoding_gives_back_any_text(bpe, text):
    for tokenizer in (bpe, byte_tokenizer()):
        ids = tokenizer.encode(text.encode())
        assert tokenizer.decode(ids) == text.encode()
        assert (ids < len(tokenizer.pieces)).all()


@pytest.mark.parametrize("text", ["a", "\n\n\n", "ab" * 100_000, "<unk>\n" * 900, ODD * 50], ids=range(5))
@pytest.mark.parametrize("vocab_size", [257, 300])
def test_all_bytes_are_in_the_vocabulary_whatever_it_was_trained_on(text, vocab_size):
    tokenizer = bpe_tokenizer(train_bpe(text.encode(), vocab_size))
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.pieces)
    assert 257 <= len(tokenizer.pieces) <= vocab_size
    assert len(set(tokenizer.pieces)) == len(tokenizer.pieces)


def test_text_that_spells_sentencepieces_own_symbols_is_text_like_any_other():
    assert b"<unk>\n" in bpe_tokenizer(train_bpe(b"<unk>\n" * 900, 300)).pieces


def test_rare_bytes_stay_in_the_vocabulary_of_a_long_text():
    text = (b"abcdefgh" * 500 + b"\n") * 9000  # 36 MB: in sentencepiece's float of 24 bits 1 - 1/36e6 is 1
    assert {bytes([byte]) for byte in range(256)} <= set(bpe_tokenizer(train_bpe(text, 270)).pieces)


def test_text_may_be_encoded_in_blocks(bpe):
    lines = PROSE.encode().splitlines(keepends=True)[:50]
    assert np.concatenate([bpe.encode(line) for line in lines]).tolist() == bpe.encode(b"".join(lines)).tolist()


def test_training_a_tokenizer_twice_gives_the_same_model_and_no_message(capfd):
    assert train_bpe(PROSE.encode(), 400) == train_bpe(PROSE.encode(), 400)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("i", [-1, 400])
def test_an_id_beyond_the_vocabulary_is_not_decoded(bpe, i):
    with pytest.raises(ValueError, match=f"id {i} was given; allowed is from 0 to 399"):
        bpe.decode([5, i])


def test_the_king_james_text_is_compressed_three_to_one():
    tokens = data.load(DataConfig())
    text = corpus.read("kjv")
    assert tokens.vocab_size == 1024
    assert 3.1 < tokens.bytes_per_token < 3.2  # measured: 3.154
    assert tokens.corpus_hash == corpus.KJV_SHA256
    assert tokens.decode(tokens.val) == b"".join(corpus.split(text)[1]).decode()
    assert tokens.decode(tokens.encode(text.decode()[:100_000])) == text.decode()[:100_000]


# Load and cache


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_both_splits_decode_to_their_text(prose, tokenizer):
    tokens = data.load(dataclasses.replace(prose, tokenizer=tokenizer))
    train, val = (b"".join(blocks) for blocks in corpus.split(PROSE.encode()))
    assert tokens.decode(tokens.train) == train.decode()
    assert tokens.decode(torch.tensor(tokens.val.tolist())) == val.decode()
    assert tokens.bytes_per_token == len(val) / len(tokens.val)
    assert tokens.corpus_hash == hashlib.sha256(PROSE.encode()).hexdigest()
    assert tokens.train.dtype == np.uint16
    assert tokens.vocab_size == {"bpe": 400, "bytes": 256}[tokenizer]


def test_equal_configurations_share_one_object_until_the_file_changes(prose, tmp_path):
    before = data.load(prose)
    assert data.load(dataclasses.replace(prose)) is before
    (tmp_path / "prose.txt").write_text(PROSE + "One more line.\n", encoding="utf-8")
    assert data.load(prose).corpus_hash != before.corpus_hash


def test_the_cache_is_used_and_gives_the_same(prose, cache, monkeypatch):
    before = data.load(prose)
    room._load.cache_clear()
    monkeypatch.setattr(room, "train_bpe", None)  # a second training would fail
    after = data.load(prose)
    assert after is not before
    assert after.tokenizer_hash == before.tokenizer_hash
    np.testing.assert_array_equal(after.train, before.train)
    assert [path.suffix for path in cache.iterdir()] == [".tokens"]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign"])
def test_a_damaged_cache_is_rebuilt(prose, cache, damage):
    before = data.load(prose)
    (path,) = cache.iterdir()
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "empty": b"",
            "cut": good[:middle],
            "flipped": good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :],
            "foreign": b"\x93NUMPY" + bytes(100),
        }[damage]
    )
    room._load.cache_clear()
    np.testing.assert_array_equal(data.load(prose).train, before.train)
    room._load.cache_clear()
    assert path.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_done_without(prose, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert data.load(prose).vocab_size == 400


def test_two_processes_may_build_one_cache_at_once(prose, cache):
    code = (
        "import sys; from sandbox import data; from sandbox.config import DataConfig; sys.stdin.read(1);"
        "print(data.load(DataConfig(corpus=sys.argv[1], vocab_size=400)).tokenizer_hash)"
    )
    command = [sys.executable, "-c", code, prose.corpus]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    results = [process.communicate("x", timeout=120) for process in both]
    assert results == [(data.load(prose).tokenizer_hash + "\n", "")] * 2
    assert len(list(cache.iterdir())) == 1


# Batches


@pytest.fixture(params=["text", "binary"])
def tokens(request):
    return data.load(request.getfixturevalue({"text": "prose", "binary": "binary"}[request.param]))


def test_a_batch_is_a_pure_function_of_its_arguments(tokens):
    torch.manual_seed(1)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    x_BT, y_BT = data.batch(tokens, 3, 7, 4, 16)
    data.batch(tokens, 3, 8, 4, 16)
    again = data.batch(tokens.train, 3, 7, 4, 16)
    assert torch.equal(x_BT, again[0])
    assert torch.equal(y_BT, again[1])
    assert torch.equal(state, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_state, np.random.get_state()[1])


def test_a_batch_holds_windows_of_the_training_split_and_y_is_one_ahead(tokens):
    x_BT, y_BT = data.batch(tokens, 0, 0, 32, 16)
    assert x_BT.shape == y_BT.shape == (32, 16)
    assert x_BT.dtype == y_BT.dtype == torch.int64
    assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
    windows = {tuple(w) for w in np.lib.stride_tricks.sliding_window_view(tokens.train[:], 17).tolist()}
    assert {(*x.tolist(), y[-1].item()) for x, y in zip(x_BT, y_BT, strict=True)} <= windows


def test_the_stream_is_the_same_on_every_machine():
    x_BT, _ = data.batch(np.arange(1000, dtype=np.uint16), 1, 2, 4, 8)
    assert x_BT[:, 0].tolist() == [638, 444, 930, 427]  # as drawn by numpy 2.4.6: PCG64 of SeedSequence([1, 2])


def test_seed_and_step_both_change_the_batch(tokens):
    batches = [data.batch(tokens, seed, step, 4, 16)[0] for seed in range(3) for step in range(3)]
    assert len({tuple(x.flatten().tolist()) for x in batches}) == 9


def test_every_window_is_drawn_equally_often():
    ids = np.arange(13, dtype=np.uint16)
    starts = torch.cat([data.batch(ids, 0, step, 100, 3)[0][:, 0] for step in range(100)])
    counts = torch.bincount(starts, minlength=10)
    assert len(counts) == 10  # the last window ends with the last token
    assert (counts - 1000).abs().max() < 120  # four standard deviations of a count


def test_validation_is_whole_batches_of_spread_out_windows_that_do_not_overlap():
    ids = np.arange(10_001, dtype=np.uint16)
    batches = data.validation_batches(ids, 4, 10, eval_tokens=1000)
    assert [x.shape for x, _ in batches] == [(4, 10)] * 25
    starts = torch.cat([x[:, 0] for x, _ in batches])
    assert starts.tolist() == list(range(0, 10_000, 100))
    assert all(torch.equal(x + 1, y) for x, y in batches)


def test_validation_rounds_up_to_whole_batches_and_down_to_what_there_is():
    ids = np.arange(101, dtype=np.uint16)
    assert len(data.validation_batches(ids, 2, 10, eval_tokens=21)) == 2
    everything = data.validation_batches(ids, 3, 10, eval_tokens=10**9)
    assert len(everything) == 3
    assert len({x[0].item() for xs, _ in everything for x in xs}) == 9


def test_validation_of_tokens_uses_their_validation_split(binary):
    ((x_BT, _),) = data.validation_batches(data.load(binary), 2, 99, eval_tokens=1)
    assert x_BT[:, 0].tolist() == [0, 99]


# Shards


def test_shards_read_as_one_sequence_without_being_read(binary):
    tokens = data.load(binary)
    assert len(tokens.train) == 600
    assert all(isinstance(part, np.memmap) for part in tokens.train.parts)
    for window in (slice(95, 110), slice(99, 101), slice(100, 103), slice(None), slice(-5, None), slice(7, 7)):
        np.testing.assert_array_equal(tokens.train[window], np.arange(600)[window])
    with pytest.raises(ValueError, match="step 2"):
        tokens.train[::2]


def test_windows_cross_the_borders_of_shards(binary):
    x_BT, y_BT = data.batch(data.load(binary), 0, 0, 64, 400)  # longer than any two shards but the last
    assert torch.equal(x_BT + 1, y_BT)
    assert (x_BT[:, 0] < 100).any()


def test_shards_know_their_ids_but_not_their_text(binary):
    tokens = data.load(binary)
    assert tokens.vocab_size == 600
    assert math.isnan(tokens.bytes_per_token)
    with pytest.raises(ValueError, match="tokens already"):
        tokens.encode("text")
    with pytest.raises(ValueError, match="tokens already"):
        tokens.decode([1])


def test_the_hash_of_shards_follows_their_content(binary, tmp_path):
    before = data.load(binary).corpus_hash
    assert before == data.load(DataConfig(corpus=binary.corpus, tokenizer="bytes")).corpus_hash
    write_shard(tmp_path / "bins" / "web_val_000000.bin", np.arange(200)[::-1])
    assert data.load(binary).corpus_hash != before


def test_of_a_long_shard_a_part_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_LOOK", 10)
    path = write_shard(tmp_path / "x_train_0.bin", np.arange(6400))
    assert shards.survey([path])[0] == 6309  # the first 10 of each 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"magic": 20240801}, "must begin with 20240520, 1"),
        ({"version": 2}, "must begin with 20240520, 1"),
        ({"count": 201}, "promises 201 tokens"),
        ({"count": 199}, "promises 199 tokens"),
        ({"ids": []}, "promises 0 tokens"),
    ],
)
def test_foreign_truncated_and_empty_shards_are_refused(binary, tmp_path, options, message):
    write_shard(tmp_path / "bins" / "web_val_000000.bin", **{"ids": np.arange(200)} | options)
    with pytest.raises(ValueError, match=message):
        data.load(binary)


def test_a_shard_cut_inside_its_header_is_refused(binary, tmp_path):
    (tmp_path / "bins" / "web_val_000000.bin").write_bytes(b"\x08")
    with pytest.raises(ValueError, match="is no shard"):
        data.load(binary)


def test_shards_need_both_splits(binary, tmp_path):
    with pytest.raises(ValueError, match=r"no \*_val_\*\.bin among web_train_000000\.bin"):
        data.load(DataConfig(corpus=str(tmp_path / "bins" / "web_train_000000.bin")))


# Refusals


def test_a_missing_path_is_named_with_near_names():
    with pytest.raises(FileNotFoundError, match=r"'kvj' was given; no such file or folder: did you mean 'kjv'\?"):
        data.load(DataConfig(corpus="kvj"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"good\n" * 2000 + b"\xff\n", "x.txt is not UTF-8 text: invalid start byte at byte 10000"),
        (b"too short\n", "has 10 bytes; needed are more than 4096"),
    ],
)
def test_text_of_no_use_is_refused(tmp_path, text, message):
    (tmp_path / "x.txt").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        data.load(DataConfig(corpus=str(tmp_path / "x.txt")))


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="holds no file"):
        data.load(DataConfig(corpus=str(tmp_path / "void")))


def test_ids_beyond_the_models_vocabulary_are_refused_before_training(prose, binary):
    assert data.check(prose, vocab_size=400, context=64).vocab_size == 400
    with pytest.raises(ValueError, match=r"vocab_size=399 was given .* from 0 to 399; allowed is at least 400"):
        data.check(prose, vocab_size=399, context=64)
    with pytest.raises(ValueError, match="allowed is at least 600"):
        data.check(data.load(binary), vocab_size=599, context=64)


def test_a_split_shorter_than_a_window_is_refused(binary):
    tokens = data.load(binary)
    data.check(tokens, vocab_size=600, context=199)
    with pytest.raises(ValueError, match="the validation split has 200 tokens; context=200 needs at least 201"):
        data.check(tokens, vocab_size=600, context=200)
    with pytest.raises(ValueError, match="the training split has 600 tokens; context=600 needs at least 601"):
        data.batch(tokens, 0, 0, 1, 600)
    with pytest.raises(ValueError, match=r"has 2 windows of 99 tokens, batch_size=3 .* at most 2"):
        data.validation_batches(tokens, 3, 99, eval_tokens=1)
