"""Metrics of how tokens are spread over experts."""

import re

import moe_model
import pytest
from moe_model import EXPERTS, LAYERS, TOP_K

IMBALANCE, HOTTEST = "plimsoll_expert_imbalance_ratio", "plimsoll_expert_hottest_token_ratio"


def by_layer(server, name: str) -> list[float]:
    return [server.metric(name, layer=str(layer)) for layer in range(LAYERS)]


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("spread", [True, False])
def test_each_layer_says_how_its_tokens_are_spread(start, tmp_path, spread, ranks):
    moe_model.write(tmp_path, spread)
    with start(str(tmp_path), "-tp", ranks, "--max-num-seqs", "4", "--served-model-name", "moe") as server:
        page = server.http.get("/metrics").raise_for_status().text
        # Steps of the proof are not counted: all their tokens are alike.
        assert not re.search(r"^plimsoll_expert_\w+\{", page, re.MULTILINE), page
        prompt = list(range(EXPERTS, 9 * EXPERTS))
        server.openai.completions.create(model="moe", prompt=prompt, max_tokens=1, temperature=0)
        imbalance, hottest = by_layer(server, IMBALANCE), by_layer(server, HOTTEST)
        if spread:
            # The last layer computes only the row that is sampled from, which goes to TOP_K experts.
            assert imbalance == [1] * (LAYERS - 1) + [EXPERTS / TOP_K]
            assert hottest == [TOP_K / EXPERTS] * (LAYERS - 1) + [1]
        else:
            assert imbalance == [EXPERTS / TOP_K] * LAYERS and hottest == [1] * LAYERS


def test_models_without_experts_have_no_such_metrics(sim):
    assert "plimsoll_expert" not in sim.http.get("/metrics").raise_for_status().text
