"""What the picture of a plan shows, by hand."""

from rlsys.reallocation.plan import plan
from rlsys.reallocation.shards import Box
from scripts.draw_plan import arrivals, draw, placed
from tests.reallocation.plan_harness import box, holding

QUERIES = "layers.0.q_proj.weight"
FIRST, LAST = box((0, 2), (0, 4)), box((2, 4), (0, 4))


def test_an_engine_gets_what_its_node_stages_and_what_another_sends() -> None:
    """Four ranks with a quarter of the columns each, of two nodes, to engines of two ranks with
    half of the rows each."""
    quarters = [box((0, 4), (n, n + 1)) for n in range(4)]
    sources, targets = placed(
        [[holding(QUERIES, (4, 4), part)] for part in quarters],
        [[holding(QUERIES, (4, 4), half)] for half in (FIRST, LAST)],
    )
    assert [one.node for one in sources] == ["node 0", "node 0", "node 1", "node 1"]
    assert [one.rank for one in targets] == [
        f"node {node}, engine rank {rank}" for node in (0, 1) for rank in (0, 1)
    ]
    cells, foreign = arrivals(plan(sources, targets), targets[3])[QUERIES]

    def below(column: int) -> Box:
        return box((2, 4), (column, column + 1))

    assert cells == {below(column): (column,) for column in range(4)}
    assert foreign == {below(0), below(1)}
    figure = draw("some title", sources, targets)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["trainer: queries", *(one.rank for one in targets)]
