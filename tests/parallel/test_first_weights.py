"""A model that no rank ever holds whole begins with the weights of one rank."""

import pytest
from parallel_work import first_weights
from rank_jobs import run_ranks

from tutti.models.transformer import GPT
from tutti.parallel.shard import init_parameters


@pytest.mark.ranks
def test_shards_made_on_each_rank_are_parts_of_the_weights_of_one_rank() -> None:
    model = GPT(vocabulary=11, context=5, width=12, depth=2, heads=2)
    init_parameters(model, seed=3)
    expected = {name: value.tolist() for name, value in model.named_parameters()}
    whole = sum(value.numel() for value in model.parameters())
    answers = run_ranks(4, first_weights, (2, 4))
    for index, shard in enumerate((2, 4)):
        held = [answer[index].pop("held") for answer in answers]
        assert sum(held) == whole * 4 // shard and max(held) < 1.2 * whole / shard
        assert all(answer[index] == expected for answer in answers)
