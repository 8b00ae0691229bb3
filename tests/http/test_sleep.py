"""Sleep mode, with vLLM's paths: the memory of everything but the weights goes and comes back, the text stays the same."""

import contextlib
import threading

import conftest
import pytest
from test_sim import CHAT, HELLO, error

ASK = {"messages": HELLO, "max_tokens": 200, "seed": 5, "ignore_eos": True}


def text(server) -> str:
    return server.http.post(CHAT, json=ASK).raise_for_status().json()["choices"][0]["message"]["content"]


def held(server) -> dict:
    return server.http.get("/memory").raise_for_status().json()["now"]["components"]


def test_without_the_flag_there_is_no_sleep_mode(sim):
    for path in ["/sleep", "/wake_up"]:
        assert error(sim.http.post(path), 404)["code"] == "unknown_url"
    assert error(sim.http.get("/is_sleeping"), 404)


@pytest.mark.parametrize("model", ["sim", "sim:window=40"])
def test_sleep_gives_memory_back_and_waking_takes_it_again(start, model):
    with start(model, "--served-model-name", "sim", "--enable-sleep-mode", "--max-model-len", "2048") as server:
        said, awake = text(server), held(server)
        assert awake["kv"] > 0
        for rounds in [1, 2]:
            assert server.http.post("/sleep", params={"level": "1"}).json() == {"is_sleeping": True}
            assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
            asleep = held(server)
            assert asleep == {name: bytes if name == "weights" else 0 for name, bytes in awake.items()}
            assert server.http.get("/health").status_code == 200
            assert server.http.get("/ready").json()["status"] == "sleeping"
            refused = server.http.post(CHAT, json=ASK)
            assert error(refused, 503)["code"] == "sleeping" and int(refused.headers["retry-after"]) > 0
            # Nothing went wrong: clients that ask again and again fill no log.
            assert "request failed" not in server.log.read_text()
            assert server.http.post("/wake_up").json() == {"is_sleeping": False}
            assert server.http.get("/ready").status_code == 200
            assert (held(server), text(server)) == (awake, said)
            assert server.metric("plimsoll_engine_rebuilds_total", reason="wake") == rounds
        assert server.metric("plimsoll_engine_rebuilds_total", reason="oom") == 0
        assert server.metric("plimsoll_device_allocs_after_ready_total") == 0
        assert server.metric("plimsoll_high_water_above_proof_total") == 0
        assert error(server.http.post("/sleep", params={"level": "2"}), 400)["param"] == "level"


def test_sleep_waits_for_those_that_run_and_cuts_nobody_off(start):
    # One after the other, four answers take at least four seconds.
    with start("sim:0.002", "--enable-sleep-mode", "--max-model-len", "8192", "--max-num-seqs", "1") as server:
        body = {"messages": HELLO, "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 4}
        request = server.http.build_request("POST", CHAT, json=body)
        with contextlib.closing(server.http.send(request, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert "still in progress" in error(server.http.post("/sleep", params={"timeout": "0.05"}), 409)["message"]
            assert server.http.get("/ready").status_code == 200
            slept = []
            sleeper = threading.Thread(target=lambda: slept.append(server.http.post("/sleep", params={"timeout": str(conftest.PATIENCE)})))
            sleeper.start()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        sleeper.join(conftest.PATIENCE)
        assert slept[0].json() == {"is_sleeping": True}
        # It ends, asleep, when it is told to.
