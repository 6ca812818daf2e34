from collections import Counter
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.dense import Product, dense_network, parameters, step_gemms, weights
from planner.cost.dense_time import (
    backward_seconds,
    forward_seconds,
    product_seconds,
    saved_activation_bytes,
)
from planner.cost.elementwise import elementwise_seconds
from planner.cost.gemm import gemm_seconds
from planner.specs.kernels import Epilogue, Gemm, Layout
from planner.specs.load import load_device, load_model
from planner.specs.model import Architecture, DcnInteraction, ModelSpec
from planner.specs.units import Dtype
from tests.cost.helpers import context, data_file, small_model

PUBLISHED = {
    "dlrm": "dlrm_dcnv2",
    "dlrm_v1_1tb": "dlrm_v1_1tb",
    "dlrm_kaggle": "dlrm_kaggle",
    "dlrm_1tb_10m": "dlrm_1tb_10m",
    "hugectr_180t_70b_hot80": "hugectr_180t_70b_hot80",
    "hugectr_7t_470b_hot20": "hugectr_7t_470b_hot20",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_equal_published_counts(name: str) -> None:
    published = yaml.safe_load(data_file("models/models.yaml").read_text())
    derived = published[PUBLISHED[name]]["derived"]
    network = dense_network(load_model(name))
    assert weights(network.blocks) == derived["dense_params"]
    flops = sum(
        2 * shape.m * shape.n * shape.k
        for block in network.blocks
        for linear in block.linears
        for shape in [linear.forward(1)]
    )
    # The published count takes each pair of a dot interaction once.
    flops += sum(
        product.m * (product.m - 1) * product.k
        for block in network.blocks
        for product in block.products
        if isinstance(product, Product)
    )
    assert flops / 1e6 == pytest.approx(derived["fwd_mflop_per_sample"], rel=0.005)


@pytest.mark.parametrize(
    "name", ["dlrm", "dlrm_kaggle", "deepfm_criteo", "de_tiny", "de_medium", "dlrm_criteo_small"]
)
def test_parameters_equal_the_trained_network(name: str) -> None:
    torch = pytest.importorskip("torch")
    networks = pytest.importorskip("trainers.models.networks")
    model = load_model(name)
    with torch.device("meta"):
        network = networks.build_network(model)
    trained = sum(parameter.numel() for parameter in network.parameters())
    assert parameters(dense_network(model).blocks) == trained


def test_small_model_by_hand() -> None:
    network = dense_network(small_model())
    # Bottom 13*8+8 + 8*4+4; three vectors give 3 pairs, so the top reads 4 + 3 columns.
    assert parameters(network.bottom) == 13 * 8 + 8 + 8 * 4 + 4
    assert parameters(network.top) == 7 * 16 + 16 + 16 + 1
    first = network.bottom[0].linears[0]
    assert first.forward(64) == Gemm(64, 8, 13, 1, Layout.NT, Epilogue.BIAS_RELU)
    # There is no gradient of the dense features.
    assert first.backward(64) == (Gemm(8, 13, 64, 1, Layout.TN),)
    assert network.bottom[0].linears[1].backward(64) == (
        Gemm(4, 8, 64, 1, Layout.TN),
        Gemm(64, 8, 4, 1, Layout.NN),
    )
    assert network.top[-1].linears[-1].forward(64) == Gemm(64, 1, 16, epilogue=Epilogue.BIAS)
    # V V^T of three vectors, and its gradient S V.
    assert step_gemms(network.top[1:2], 64) == {
        Gemm(3, 3, 4, 64, Layout.NT): 1,
        Gemm(3, 4, 3, 64, Layout.NN): 1,
    }


def enumerated(model: ModelSpec, batch: int, recompute: bool) -> Counter[Gemm]:
    """Products of a DLRM-DCN step straight from the model file."""
    assert isinstance(model.interaction, DcnInteraction)
    found: Counter[Gemm] = Counter()
    again = 2 if recompute else 1

    def add(inputs: int, outputs: int, epilogue: Epilogue, times: int, first: bool = False) -> None:
        found[Gemm(batch, outputs, inputs, 1, Layout.NT, epilogue)] += times
        found[Gemm(outputs, inputs, batch, 1, Layout.TN)] += 1
        if not first:
            found[Gemm(batch, inputs, outputs, 1, Layout.NN)] += 1

    width = model.dense_features
    for index, output in enumerate(model.bottom_mlp):
        add(width, output, Epilogue.BIAS_RELU, again, first=index == 0)
        width = output
    width += sum(table.embedding_dim for table in model.all_tables)
    for _ in range(model.interaction.num_layers):
        add(width, model.interaction.low_rank, Epilogue.NONE, 1)
        add(model.interaction.low_rank, width, Epilogue.CROSS, 1)
    for output in model.top_mlp[:-1]:
        add(width, output, Epilogue.BIAS_RELU, again)
        width = output
    add(width, model.top_mlp[-1], Epilogue.BIAS, again)
    return found


@pytest.mark.parametrize("recompute", [(), ("bottom", "top")])
def test_products_of_a_step_are_those_of_the_model(recompute: tuple[str, ...]) -> None:
    model = load_model("dlrm")
    assert step_gemms(dense_network(model).blocks, 1365, recompute) == enumerated(
        model, 1365, bool(recompute)
    )


@pytest.mark.parametrize("device", ["h200", "mi350x", "cpu"])
def test_vendor_kernels_pay_for_relu_and_cross_as_operators(device: str) -> None:
    model = load_model("dlrm")
    ctx = context(device, per_node=1, model=model, local_batch=512)
    blocks = dense_network(model).blocks
    assert isinstance(model.interaction, DcnInteraction)
    layers = model.interaction.num_layers
    activated = [*model.bottom_mlp, *model.top_mlp[:-1]]
    width = model.bottom_mlp[-1] + model.pooled_width
    # ReLU reads and writes its output; a cross layer's tail reads three operands and writes one;
    # the bottom's output and the embeddings are copied together.
    moved = 4 * 512 * (2 * sum(activated) + 4 * layers * width + 2 * width)
    operators = len(activated) + layers + 1
    products = [
        gemm_seconds(ctx.device, gemm.m, gemm.n, gemm.k, Dtype.FP32)
        for gemm in enumerated(model, 512, False).elements()
        if gemm.layout is Layout.NT
    ]
    expected = sum(products) + elementwise_seconds(ctx.device, moved, operators)
    assert forward_seconds(ctx, blocks) == pytest.approx(expected, rel=1e-12)


GPUS = ["h200", "mi350x"]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 70_000),
    device=st.sampled_from(GPUS),
    name=st.sampled_from(["dlrm", "dlrm_kaggle", "wukong_criteo"]),
    precision=st.sampled_from([Dtype.BF16, Dtype.TF32]),
)
def test_preselected_is_never_slower_than_vendor(
    batch: int, device: str, name: str, precision: Dtype
) -> None:
    profile, network = load_device(device), dense_network(load_model(name))
    vendor = product_seconds(profile, precision, "vendor", network, batch)
    chosen = product_seconds(profile, precision, "preselected", network, batch)
    assert vendor.keys() == chosen.keys()
    for gemm, seconds in chosen.items():
        assert seconds <= vendor[gemm] * (1 + 1e-12)
        if gemm.batch > 1:
            assert seconds == pytest.approx(vendor[gemm], rel=1e-12)


def test_preselection_shortens_a_step() -> None:
    ctx = context("h200", model=load_model("dlrm"), local_batch=8192, precision=Dtype.BF16)
    own = replace(ctx, policy=ctx.policy.model_copy(update={"kernels": "preselected"}))
    blocks = dense_network(ctx.model).blocks
    assert backward_seconds(own, blocks) < backward_seconds(ctx, blocks)
    assert forward_seconds(own, blocks) < forward_seconds(ctx, blocks)


def test_saved_activations_by_hand() -> None:
    # Bottom: input 13, ReLU outputs 8 + 4. Dot: 3 vectors of 4. Top: input 7, ReLU output 16.
    floats = (13 + 8 + 4) + 3 * 4 + (7 + 16)
    assert saved_activation_bytes(context(local_batch=64)) == 64 * 4 * floats
    # Both: the bottom's input and the interaction's, and the top while it runs again.
    kept = 13 + 3 * 4 + (7 + 16)
    for recompute in (("bottom", "top"), ("bottom",)):
        ctx = context(local_batch=64, recompute=recompute)
        assert saved_activation_bytes(ctx) == 64 * 4 * kept
    # The top alone: it is the first that runs again, when everything else is still there.
    alone = context(local_batch=64, recompute=("top",))
    assert saved_activation_bytes(alone) == 64 * 4 * floats


def test_full_recompute_costs_the_mlps_forward() -> None:
    plain, full = context(local_batch=4096), context(local_batch=4096, recompute=("bottom", "top"))
    network = dense_network(plain.model)
    mlps = [block for block in network.top if block.recomputable]
    extra = backward_seconds(full, network.top) - backward_seconds(plain, network.top)
    assert extra == pytest.approx(forward_seconds(plain, mlps), rel=1e-9)


def test_every_architecture_has_positive_work() -> None:
    seen = set()
    for name in ("dlrm", "dlrm_kaggle", "deepfm_criteo", "de_medium", "wukong_criteo"):
        model = load_model(name)
        seen.add(model.arch)
        ctx = context(model=model, local_batch=128)
        assert forward_seconds(ctx, dense_network(model).blocks) > 0
        assert saved_activation_bytes(ctx) > 0
    assert seen == set(Architecture)
