"""Which ranks a cell of a picture names, by hand."""

import torch

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.reallocation.shards import Box, TensorShard
from scripts.draw_layouts import draw, holders, tokens


def box(*bounds: tuple[int, int]) -> Box:
    return Box(bounds)


def test_cells_name_all_that_hold_them() -> None:
    def held(name: str, start: int, stop: int) -> TensorShard:
        return TensorShard(
            name=name, shape=(4, 2), dtype=torch.float32, box=box((start, stop), (0, 2))
        )

    queries, norm = "layers.0.q_proj.weight", "layers.0.input_layernorm.weight"
    found = holders(
        [[held(queries, 0, 2), held(norm, 0, 4)], [held(queries, 2, 4), held(norm, 0, 4)]]
    )
    assert found == {
        queries: {box((0, 2), (0, 2)): (0,), box((2, 4), (0, 2)): (1,)},
        norm: {box((0, 4), (0, 2)): (0, 1)},
    }
    # Two panels of the layer beside the batch's tokens.
    titles = [axis.get_title() for axis in draw(ParallelLayout(tp=2), found).axes]
    assert titles == ["tokens of a batch", "layer 0: queries", "layer 0: norm"]


def test_tokens_of_a_batch_go_to_rows_then_to_places_in_them() -> None:
    assert tokens(ParallelLayout.parse("dp2tp2")) == {
        box((0, 2), (0, 4)): (0,),
        box((0, 2), (4, 8)): (1,),
        box((2, 4), (0, 4)): (2,),
        box((2, 4), (4, 8)): (3,),
    }
    assert tokens(ParallelLayout.parse("pp2")) == {box((0, 4), (0, 8)): (0, 1)}
