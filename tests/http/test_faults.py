"""Steps that go wrong, as the simulated model makes them (`sim:fail=N,oom=N`): who hears of it, and what is left behind."""

import openai
import pytest
from test_sim import CHAT, HELLO, error

ASK = {"messages": HELLO, "max_tokens": 40, "seed": 5, "ignore_eos": True}


def test_a_step_that_fails_fails_its_requests_and_no_other(start, sim):
    said = sim.http.post(CHAT, json=ASK).json()["choices"][0]["message"]["content"]
    with start("sim:fail=70") as server:
        answers = [server.http.post(CHAT, json=ASK) for _ in range(12)]
        failed = [answer for answer in answers if answer.status_code != 200]
        assert {error(answer, 500)["message"] for answer in failed} == {"the step failed: injected"}
        assert 1 < len(failed) < len(answers) and server.metric("plimsoll_steps_failed_total") == len(failed)
        assert server.metric("plimsoll_requests_failed_total") == len(failed)
        # What a failed step left behind is nobody's context.
        good = [answer for answer in answers if answer.status_code == 200]
        assert {answer.json()["choices"][0]["message"]["content"] for answer in good} == {said}
        assert server.http.get("/ready").status_code == 200
        # A line for each step, and none for each of the requests in it but their own, which are sampled.
        log = server.log.read_text()
        assert log.count("step failed step=") == len(failed) and "request failed" not in log
        server.wait_until_empty()


def test_a_step_without_memory_costs_its_requests_and_a_new_state(start, sim):
    said = sim.http.post(CHAT, json=ASK).json()["choices"][0]["message"]["content"]
    with start("sim:oom=60", "--max-model-len", "1024") as server:
        rebuilds = lambda: server.metric("plimsoll_engine_rebuilds_total", reason="oom")
        for expected in [1, 2]:
            texts = []
            with pytest.raises(openai.InternalServerError) as info:
                while True:
                    answer = server.openai.chat.completions.create(model="sim:oom=60", **without_eos())
                    texts.append(answer.choices[0].message.content)
            assert info.value.status_code == 503
            assert set(texts) <= {said}
            server.wait_for("another state", lambda: rebuilds() == expected)
            server.wait_for("readiness", lambda: server.http.get("/ready").status_code == 200)
        assert server.http.get("/memory").json()["last_oom"]
        server.wait_until_empty()


def without_eos() -> dict:
    """The same request through OpenAI's client."""
    own = {"ignore_eos": True}
    return {name: value for name, value in ASK.items() if name not in own} | {"extra_body": own}
