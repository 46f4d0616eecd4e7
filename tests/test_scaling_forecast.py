"""Times of collectives and of a step, against sums by hand; the command that prints them."""

import math
from dataclasses import replace
from typing import cast

import pytest
import torch

import learnable_multipliers as lrm
from learnable_multipliers._placement import Placement
from learnable_multipliers.optim._distributed_batches import _assign_jobs
from learnable_multipliers.optim._muon import is_hidden
from learnable_multipliers.optim._sharding import box_of
from learnable_multipliers.pretrain.distributed import Axes
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.scaling.cluster import (
    Cluster,
    Span,
    bytes_sent,
    exchange_seconds,
    seconds,
    span,
)
from learnable_multipliers.pretrain.scaling.exchange import Exchange, muon_work
from learnable_multipliers.pretrain.scaling.forecast import Batch, exposed_seconds, forecast
from learnable_multipliers.pretrain.scaling.traffic import Collective, packed_sums
from learnable_multipliers.pretrain.scaling.weights import num_parameters, weights_of

# Round numbers: 100 bytes a second in a node, 10 between nodes, no latency.
SLOW = Cluster(
    gpus_per_node=4,
    node_bandwidth=100,
    network_bandwidth=10,
    node_latency=0,
    network_latency=0,
    flops=1e12,
)
LATE = replace(SLOW, node_latency=1, network_latency=10)


def weights(preset, placement="full"):
    with torch.device("meta"):
        model = HybridLM(PRESETS[preset])
    return weights_of(model, lrm.plan(model, cast(Placement, placement)))


def collective(kind, num_bytes):
    return Collective(what="", kind=kind, over="all", num_bytes=num_bytes)


def test_groups_lie_on_nodes_by_the_stride_of_their_axis():
    axes = Axes(data=6, shard=4, tensor=2)
    cluster = Cluster(gpus_per_node=8)
    assert span(axes, "tensor", cluster) == Span(2, 1)
    assert span(axes, "shard", cluster) == Span(4, 1)
    assert span(axes, "data", cluster) == Span(1, 6)
    assert span(axes, "all", cluster) == Span(8, 6)


@pytest.mark.parametrize(
    ("kind", "over", "expected"),
    [
        # 3/4 of 1,200 bytes over NVLink.
        ("all-gather", Span(4, 1), 9.0),
        ("all-reduce", Span(4, 1), 18.0),
        # 2/3 of them over the four links of a node, which are the slower ones.
        ("all-gather", Span(4, 3), 20.0),
        ("reduce-scatter", Span(1, 3), 80.0),
    ],
)
def test_a_collective_takes_the_bytes_of_its_slower_links(kind, over, expected):
    found = collective(kind, 1200)
    assert seconds(found, over, SLOW) == pytest.approx(expected)
    # A ring of 4 x 4 has 3 messages in nodes and 3 between; a tree of 4 nodes 2 up and 2 down.
    square = Span(4, 4)
    late = seconds(found, square, LATE) - seconds(found, square, SLOW)
    assert late == pytest.approx(2 * 3 + 4 * 10 if kind == "all-reduce" else 3 + 3 * 10)


def test_ranks_send_all_but_their_own_part():
    assert bytes_sent(collective("all-gather", 1200), 4) == 900
    assert bytes_sent(collective("all-reduce", 1200), 4) == 1800


def test_an_exchange_takes_as_long_as_its_busiest_rank():
    # Rank 0 keeps 7, receives 50 inside its node and 30 from another: 6 seconds of the network.
    found = Exchange({(0, 0): 7, (1, 0): 50, (4, 0): 20, (5, 0): 10, (0, 1): 5})
    assert exchange_seconds(found, 2, SLOW) == pytest.approx(6.0)
    assert exchange_seconds(found, 2, LATE) == pytest.approx(6.0 + 3 * 1 + 10)


@pytest.mark.parametrize("axes", [Axes(1, 48, 1), Axes(6, 8, 1), Axes(3, 4, 2)])
def test_work_on_many_ranks_is_what_the_optimizer_would_divide(axes):
    found = [weight for weight in weights("tiny") if is_hidden(weight.matrix)]
    size = math.prod(axes)
    places = [(rank // axes.tensor % axes.shard, rank % axes.tensor) for rank in range(size)]
    boxes = [[box_of(w.shape, w.chunks(axes, *place)) for place in places] for w in found]
    wholes = _assign_jobs([w.matrix for w in found if w.matrix is not None], boxes, size, "blocks")
    there, back = {}, {}
    for whole in wholes:
        for rank, box in enumerate(whole.boxes):
            number = math.prod(map(len, box))
            if number and rank in whole.sources:
                there[rank, whole.owner] = there.get((rank, whole.owner), 0) + number
            if number:
                back[whole.owner, rank] = back.get((whole.owner, rank), 0) + number
    work = muon_work(found, axes)
    assert dict(work.there.numbers) == there
    assert dict(work.back.numbers) == back


def test_computation_hides_all_but_the_first_and_the_last():
    assert exposed_seconds([1, 2, 2], [2, 2, 3], one_pass=5) == 1 + 3
    assert exposed_seconds([1, 2, 2], [2, 2, 3], one_pass=1) == 1 + 3 + (4 - 1) + (4 - 2)
    # With replicas, the root's gradients are reduced twice.
    assert exposed_seconds([1, 2, 2], [2, 2, 3], one_pass=5, last=2) == 1 + 2 + 3
    assert exposed_seconds([], [], one_pass=1, last=0) == 0


def test_the_packed_sum_of_half_a_billion_parameters():
    found = weights("falcon-h1-0.5b")
    assert packed_sums(found, Axes(1, 1024, 1))[0].num_bytes == 1_480_976
    # Rows of the two matrices of a layer that tensor parallelism shards by columns.
    assert packed_sums(found, Axes(1, 8, 2))[0].num_bytes == 1_480_976 + 4 * 36 * 2 * 1024
    plain = weights("falcon-h1-0.5b", "none")
    assert packed_sums(plain, Axes(1, 8, 1))[0].num_bytes == 4 * (1 + len(plain))


def test_a_step_is_six_operations_per_parameter_and_token():
    found, batch = weights("tiny"), Batch(tokens=2**16, micro_tokens=2**10)
    given = {"batch": batch, "cluster": SLOW, "config": PRESETS["tiny"]}
    one = forecast(found, Axes(1, 8, 1), optimizer="adamw", **given)
    whole = sum(math.prod(weight.shape) for weight in found)
    assert batch.micro_batches(Axes(1, 8, 1)) == (8, 2**10)
    assert one.compute == pytest.approx(6 * whole * 2**13 / (1e12 * 0.4))
    assert one.exchange == one.newton_schulz == one.tensor == 0
    assert one.step == pytest.approx(one.compute + one.exposed + one.sums)
    # Two ranks of tensor parallelism have the same text and a part of the parameters.
    axes = Axes(1, 4, 2)
    two = forecast(found, axes, optimizer="muon", **given)
    assert num_parameters(found, axes) < whole
    assert two.compute == pytest.approx(6 * num_parameters(found, axes) * 2**14 / (1e12 * 0.4))
    assert two.newton_schulz == pytest.approx(max(muon_work(found, axes).flops) / 0.6e12)
    assert two.exchange == pytest.approx(sum(row.seconds for row in two.rows[-2:]))


def test_the_command_prints_a_line_for_each_number_of_ranks(ask):
    code, out, _ = ask("scaling", "20m-llama", "--ranks", "8", "64", "--shard", "8")
    lines = out.splitlines()
    assert code == 0
    assert [line.split("  ")[0] for line in lines[3:]] == ["1 x 8 x 1", "8 x 8 x 1"]
    _, out, _ = ask("scaling", "20m-llama", "--ranks", "64", "--shard", "8")
    assert out.splitlines()[-1].split() == lines[-1].split()
    kinds = [line.split()[0] for line in out.splitlines()[3:9]]
    assert kinds == ["weights", "gradients", "gradients", "packed", "updates", "results"]


def test_the_command_reads_a_hugging_face_folder(ask):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, vocab_size=128
    )
    config.save_pretrained("llama")
    code, out, _ = ask("scaling", "llama", "--ranks", "4", "--micro-tokens", "2e6")
    assert code == 0
    # Three layers and the rest, gathered once and the layers twice.
    assert next(line.split()[3] for line in out.splitlines() if "all-gather" in line) == "7"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("20m --ranks 12 --shard 8", "12 ranks cannot be divided into groups of shard x tensor"),
        ("20m --ranks 8 --shard 1", "8 replicas that nothing shards are DDP"),
        ("20m --ranks 8 --tensor 2", "parallel.tensor=2 does not divide model.num_kv_heads=1"),
        ("20m --ranks 8 --batch-tokens 4", "a batch of 4 tokens leaves some of 8"),
        ("20m --ranks 0", "ranks must be positive numbers"),
        ("20m --mfu 0", "mfu must be a positive number, got 0"),
    ],
)
def test_layouts_that_cannot_be_are_rejected(ask, arguments, says):
    code, out, complaints = ask("scaling", *arguments.split())
    assert (code, out) == (1, "")
    assert says in complaints
