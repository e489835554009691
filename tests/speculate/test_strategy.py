"""Strategy strings and static trees: what they mean, and what is refused."""

import pytest

import eagle3_jax as e3
from eagle3_jax.speculate.strategy import parse_strategy, with_sampled_drafts


def test_a_chain_is_a_tree_of_one_path() -> None:
    chain = parse_strategy("chain:3")
    assert chain == parse_strategy("tree:3x1x4") == parse_strategy([(0,), (0, 0), (0, 0, 0)])
    assert (chain.beams, chain.kept, chain.drafted_rows) == (((0,), (0,)), (0, 1, 2), 2)
    assert parse_strategy("plain").kept == () and parse_strategy("plain").is_chain


def test_a_static_tree_is_numbered_by_its_candidates() -> None:
    tree = parse_strategy([[0, 1, 0], [2], (0,), (0, 1), (0, 2), (2, 0)])  # in any order
    assert (tree.depth, tree.top_k, tree.nodes, tree.is_static) == (3, 3, 7, True)
    # level 1: candidates 0..2, of which 0 and 2 go on; level 2: 3 below each; level 3: 3 below (0, 1)
    assert tree.beams == ((0, 2), (1,)) and tree.kept == (0, 2, 3 + 1, 3 + 2, 3 + 3, 9)
    assert tree.drafted_rows == 3 and tree.parents == (0, 0, 0, 1, 1, 2, 3)


def test_sampled_children_take_the_place_of_ranks() -> None:
    tree = with_sampled_drafts(parse_strategy([(0,), (2,), (2, 1), (2, 4)]))
    assert tree.paths == ((0,), (1,), (1, 0), (1, 1)) and tree.sampled and tree.top_k == 2
    assert with_sampled_drafts(parse_strategy("tree:2x2x4")).paths is None


def test_levels_that_no_node_can_reach_are_not_drafted() -> None:
    assert parse_strategy("tree:5x4x3") == parse_strategy("tree:2x4x3")


@pytest.mark.parametrize(
    "strategy",
    [
        *(
            "plain:1",
            "chain:0",
            "chain:-1",
            "chain:33",
            "chain:x",
            "chain:1:2",
            "chain:2x2",
            "chain:²",
            "chain:" + "9" * 5000,
            "tree",
            "tree:",
        ),
        *("tree:2x2", "tree:0x2x2", "tree:2x0x3", "tree:2x2x1", "tree:33x1x2", "tree:2x2x4x1", "tree:axbxc", "greedy"),
    ],
)
def test_unknown_strategies_are_refused_with_the_forms_there_are(strategy: str) -> None:
    with pytest.raises(e3.UserError, match="is not known / use plain, auto, chain:K, or tree:DxKxN") as caught:
        parse_strategy(strategy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("strategy", "most"), [("tree:4x1x24", 5), ("tree:1x3x5", 4), ("tree:2x2x8", 7)])
def test_more_nodes_than_can_be_drafted_are_refused(strategy: str, most: int) -> None:
    with pytest.raises(e3.UserError, match=f"give at most {most} with the root"):
        parse_strategy(strategy)
    depth, top_k, _ = strategy[5:].split("x")
    assert parse_strategy(f"tree:{depth}x{top_k}x{most}").nodes == most


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "list of paths"),
        ([()], "list of paths"),
        ([(0,), (-1,)], "list of paths"),
        ([(0,), (0,)], "twice"),
        ([(0,), (1, 0)], r"\(1, 0\) has no parent"),
        ([(0,) * n for n in range(1, 34)], "too deep"),
    ],
)
def test_impossible_static_trees_are_refused(paths, message: str) -> None:
    with pytest.raises(e3.UserError, match=message):
        parse_strategy(paths)


@pytest.mark.parametrize("strategy", [None, 3, [1, 2]])
def test_what_is_no_strategy_at_all_is_refused(strategy, untyped) -> None:
    with pytest.raises(e3.UserError, match="is neither text nor a list of paths"):
        parse_strategy(strategy)
