import contextlib
import sys

import pytest

from llamarl_jax.bench import peers
from llamarl_jax.bench.peers import Peer, PeerError, PeerSpec, open_peers

ANSWER = """
import json, sys
assert sys.argv[2:] == ["f32"]
print(json.dumps({"version": "1.2"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    tokens = [[7] * request["new_tokens"] for _ in request["prompts"]]
    answer = {"total_s": 3.0, "prefill_s": 1.0, "decode_steps": 4, "step_s": 0.5, "token_ids": tokens}
    print(json.dumps(answer if request["new_tokens"] < 9 else {"error": "too long for me"}), flush=True)
"""


@pytest.fixture
def peer_script(tmp_path, monkeypatch):
    """Installs a script as the only peer."""
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "PEERS", (PeerSpec("fake", "env", "run.py", ("f32",)),))
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)

    def install(source):
        (tmp_path / "run.py").write_text(source)

    return install


def test_a_peer_answers_run_after_run(peer_script, tmp_path):
    peer_script(ANSWER)
    with contextlib.ExitStack() as stack:
        (peer,), left_out = open_peers(tmp_path, stack)
        assert (peer.name, peer.version, left_out) == ("fake", "1.2", {})
        for _ in range(2):
            sample = peer.run([[1, 2], [3, 4]], 4)
            assert sample.decode_tokens_per_s == 4.0
            assert sample.token_ids == [[7] * 4] * 2


def test_a_peer_says_why_it_cannot(peer_script, tmp_path):
    peer_script(ANSWER)
    with contextlib.ExitStack() as stack:
        (peer,), _ = open_peers(tmp_path, stack)
        with pytest.raises(PeerError, match="too long for me"):
            peer.run([[1, 2]], 9)


def test_a_peer_that_does_not_start_is_left_out_with_its_reason(peer_script, tmp_path):
    peer_script("import sys; sys.exit('no such library')")
    with contextlib.ExitStack() as stack:
        running, left_out = open_peers(tmp_path, stack)
    assert running == []
    assert left_out["fake"].startswith("the process has ended or did not answer within 900 s")
    assert "no such library" in left_out["fake"]


def test_a_peer_that_is_not_installed_names_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    with pytest.raises(PeerError, match=r"not installed; run bash tests/benchmarks/peers/setup\.sh"):
        Peer(peers.PEERS[0], tmp_path)


def test_a_peer_that_died_is_an_error(peer_script, tmp_path):
    peer_script("import json; print(json.dumps({'version': '1'}), flush=True)")
    peer = Peer(peers.PEERS[0], tmp_path)
    peer._process.wait()
    with pytest.raises(PeerError, match="the process has ended"):
        peer.run([[1]], 2)
    peer.close()


def test_the_setup_script_exists():
    assert (peers.ROOT / peers.SETUP.removeprefix("bash ")).is_file()
    assert all((peers.ROOT / "tests" / "benchmarks" / "peers" / spec.script).is_file() for spec in peers.PEERS)
