"""Peers through the line protocol, with workers that only pretend."""

import json

import pytest
from palimpsest.bench.clock import Sample
from palimpsest.bench.peers import Peer, PeerError, read_specs, running
from palimpsest.engine.errors import ConfigError


def test_a_worker_is_asked_in_the_words_of_the_protocol(peers_folder):
    folder = peers_folder({"variant": "slow"})
    with running(folder, threads=2) as [peer]:
        assert peer.spec.label == "fake slow"
        assert peer.prefill(512, 1003) == Sample(0.512, 0.25)
        assert peer.decode(8, 1000, 12) == Sample(0.096, 0.25)
        assert peer.turn([3, 4], 2) == (Sample(0.002, 0.25), [7, 7])
    asked = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert asked == [
        {"op": "prefill", "n": 512, "seed": 1003},
        {"op": "decode", "batch": 8, "ctx": 1000, "steps": 12},
        {"op": "turn", "prompt": [3, 4], "n": 2},
        {"op": "quit"},
    ]
    with pytest.raises(ProcessLookupError):
        import os

        os.kill(peer._process.pid, 0)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("refuses", "fake: NotImplementedError: no such op"),
        ("dies", "fake has died or does not speak JSON: out of mem"),
    ],
)
def test_trouble_while_working_names_the_peer_and_its_last_words(peers_folder, trouble, message):
    folder = peers_folder({"arguments": ["1e-3", trouble]})
    with running(folder, threads=1) as [peer], pytest.raises(PeerError, match=message):
        peer.prefill(16, 1)


def test_a_dead_peer_stays_dead(peers_folder):
    folder = peers_folder({"arguments": ["1e-3", "dies"]})
    with running(folder, threads=1) as [peer]:
        for _ in range(2):
            with pytest.raises(PeerError, match="out of memory"):
                peer.prefill(16, 1)


def test_peers_that_do_not_start_are_left_out(peers_folder, capsys):
    absent = {"engine": "absent", "command": ["absent/bin/python", "worker.py"]}
    folder = peers_folder(absent, {"engine": "broken", "arguments": ["1", "no start"]}, {"engine": "good"})
    with running(folder, threads=1) as peers:
        assert [peer.spec.engine for peer in peers] == ["good"]
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 2
    assert complaints[0].startswith("absent cannot be started: ")
    assert complaints[1] == "broken has died or does not speak JSON: the model file is missing; left out"


def test_a_peer_that_says_nothing_is_given_up(peers_folder, monkeypatch):
    monkeypatch.setattr("palimpsest.bench.peers.PATIENCE", 0.2)
    folder = peers_folder({"command": ["/bin/sleep", "60"]})
    with pytest.raises(PeerError, match="fake did not answer within 0 s"):
        Peer(read_specs(folder)[0], folder, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "peers.json is not JSON"),
        ("{}", "must hold a list of objects"),
        ('[{"engine": "x"}]', "missing .* required positional arguments"),
        ('[{"engine": "x", "comand": []}]', "no key 'comand'; did you mean 'command'"),
    ],
)
def test_a_wrong_manifest_is_told_apart(tmp_path, text, message):
    (tmp_path / "peers.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_specs(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int3"}, "dtype of fake must be one of float32, .*, got 'int3'"),
        ({"kv_dtype": "f16"}, "kv_dtype of fake must be one of .*float16.*, got 'f16'"),
        ({"command": []}, "command of fake is empty"),
    ],
)
def test_a_wrong_entry_is_named(peers_folder, change, message):
    with pytest.raises(ConfigError, match=message):
        read_specs(peers_folder(change))


def test_a_folder_without_a_manifest_says_where_to_read(tmp_path):
    with pytest.raises(ConfigError, match=r"bench/README\.md"):
        read_specs(tmp_path)
