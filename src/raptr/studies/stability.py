"""What bypassing one layer does to a trained model (the paper's section 5, "Empirical verification with BERT").

    F          all layers, none scaled; F(x) is the last hidden state, before the final normalisation
    F_-ℓ       F with layer ℓ bypassed and nothing else changed
    ‖y^(ℓ)‖    the norm of F's hidden state after layer ℓ, mean over tokens
    Ψ_ℓ        ‖F_-ℓ - F‖, mean over tokens
    L(F)       the loss of F; L(F_-ℓ) is the loss of F_-ℓ

F is unscaled for every run, as in the paper, even where the run's own evaluation multiplies layers by their keep
probability (stages before the last without scaling, stochastic depth) or by a gate.

The paper claims, for BERT-Large after 50k steps with L-1 layers: norms grow linearly, Ψ_ℓ/Ψ_1 as (L/ℓ)^0.12, and L(F)
is at most the mean of L(F_-ℓ). (Its main text calls the loss of the subnetworks L₁ and that of the full model L₂; the
proof in its appendix swaps the names. They are not used here.)

`study_stability` reads a run folder of this project; `stability_of` takes any other model. Deviations: training may
scale the layers of a subnetwork (√2 for the layer below the gap, or 1/p), F_-ℓ does not; the loss with those scales is
measured too. Intervals are over batches of text: they say nothing about other training seeds. Everything is computed in
float32, whatever the precision of training.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import correlation, linear_regression
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from raptr.data.batch import Batch
from raptr.data.source import EvalData
from raptr.files import write_json
from raptr.models.attach import attach, running
from raptr.models.model import Model
from raptr.report.plots import COLOURS, GREY, INK, MARKERS, clean
from raptr.studies.contract import RESULT, run_jobs, study_folder
from raptr.studies.linear import exponent, interval
from raptr.subnetworks import Subnetwork
from raptr.train import checkpoint
from raptr.train.loading import load_model
from raptr.train.opening import open_data
from raptr.train.run import environment

CLAIMED_PSI = 0.12


@dataclass(frozen=True)
class Probe:
    """What the study needs of a model; `loss` runs a batch under a subnetwork."""

    blocks: Sequence[nn.Module]
    loss: Callable[[Any, Subnetwork], Tensor]
    real: Callable[[Any], Tensor | None]  # which positions (B, S) hold tokens; None: all of them
    weight: Callable[[Any], int]  # the batch's weight in the mean loss
    trained: Callable[[int], Subnetwork] | None = None  # the subnetwork without a layer, as training ran it

    @property
    def full(self) -> Subnetwork:
        """F: all layers, none scaled."""
        return Subnetwork.full(len(self.blocks))

    def without(self, layer: int) -> Subnetwork:
        """Return F with one layer, counted from 0, bypassed."""
        return Subnetwork(tuple(float(other != layer) for other in range(len(self.blocks))))


def probe_model(model: Model, trained: Callable[[int], Subnetwork] | None = None) -> Probe:
    """Return the probe of a model of this project; batches are `Batch`."""
    device = next(model.parameters()).device

    def loss(batch: Batch, subnetwork: Subnetwork) -> Tensor:
        value: Tensor = model(batch.to(device), model.inputs(subnetwork))
        return value

    return Probe(list(model.blocks), loss, lambda _: None, lambda batch: len(batch.labels_BM), trained)


def probe_attached(model: nn.Module, blocks: str | nn.ModuleList | None = None) -> Probe:
    """Return the probe of any model with a list of residual blocks; batches are mappings with its inputs and labels."""
    routed = attach(model, blocks)
    device = next(model.parameters()).device

    def loss(batch: Mapping[str, Tensor], subnetwork: Subnetwork) -> Tensor:
        if "labels" not in batch:
            raise ValueError(f"a batch has {', '.join(batch)}; labels are needed too, for the loss")
        with running(routed, subnetwork):
            value: Tensor = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        return value

    return Probe(
        list(routed.blocks),
        loss,
        lambda batch: batch.get("attention_mask"),
        lambda batch: int((batch["labels"] != -100).sum()),  # the targets, over which `transformers` averages
    )


def stability(probe: Probe, batches: Sequence[Any]) -> dict[str, Any]:
    """Return the study's numbers for a model, measured on some batches."""
    return gather([measure(probe, batch) for batch in batches])


def stability_of(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], blocks: str | nn.ModuleList | None = None
) -> dict[str, Any]:
    """Return the study's numbers for any other model. Its training or evaluation mode is restored."""
    training = model.training
    model.eval()
    try:
        return {"study": "stability", "environment": environment()} | stability(probe_attached(model, blocks), batches)
    finally:
        model.train(training)


def measure(probe: Probe, batch: Any) -> dict[str, Any]:
    """Return the numbers of one batch. The model must be in evaluation mode and have at least 2 layers."""
    layers = len(probe.blocks)
    if layers < 2:
        raise ValueError(f"the model has {layers} layer; at least 2 are needed to leave one out")
    states, loss = _states(probe, batch, probe.full)
    final_BSD, real_BS = states[-1], probe.real(batch)

    def mean(values_BS: Tensor) -> float:
        if real_BS is None:
            return values_BS.double().mean().item()
        return values_BS[real_BS.to(values_BS.device).bool()].double().mean().item()

    norm_BS = final_BSD.norm(dim=-1)
    psi, relative, losses, trained = [], [], [], []
    for layer in range(layers):
        subnetwork = probe.without(layer)
        states_without, loss_without = _states(probe, batch, subnetwork)
        psi_BS = (states_without[-1] - final_BSD).norm(dim=-1)
        psi.append(mean(psi_BS))
        relative.append(mean(psi_BS / norm_BS))
        losses.append(loss_without)
        same = probe.trained is None or probe.trained(layer) == subnetwork
        trained.append(
            loss_without if same or probe.trained is None else _states(probe, batch, probe.trained(layer))[1]
        )
    return {
        "tokens": norm_BS.numel() if real_BS is None else int(real_BS.sum()),
        "weight": probe.weight(batch),
        "norms": [mean(state_BSD.norm(dim=-1)) for state_BSD in states],
        "psi": psi,
        "relative": relative,
        "loss": loss,
        "losses_without": losses,
        "losses_as_trained": trained,
    }


def gather(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over batches, and fitted exponents with intervals over batches."""
    if not measured:
        raise ValueError("there is no batch to measure on; at least one is needed")

    def mean(key: str, weight: str) -> Any:
        return np.average(
            [entry[key] for entry in measured], axis=0, weights=[entry[weight] for entry in measured]
        ).tolist()

    layers = len(measured[0]["psi"])
    places = list(range(1, layers + 1))
    shares = [layers / place for place in places]
    inner = slice(1, -1) if layers > 3 else slice(None)
    curves = {key: mean(key, "tokens") for key in ("norms", "psi", "relative")}
    losses = {key: mean(key, "weight") for key in ("loss", "losses_without", "losses_as_trained")}
    gap = [float(np.mean(entry["losses_without"]) - entry["loss"]) for entry in measured]
    trained_gap = [float(np.mean(entry["losses_as_trained"]) - entry["loss"]) for entry in measured]
    bound = float(np.mean(curves["relative"]))
    return {
        "layers": layers,
        "batches": len(measured),
        "tokens": sum(entry["tokens"] for entry in measured),
        **curves,
        **losses,
        "mean_relative": bound,
        "mean_loss_without": float(np.mean(losses["losses_without"])),
        "mean_loss_as_trained": float(np.mean(losses["losses_as_trained"])),
        "gap": interval(gap),
        "gap_as_trained": interval(trained_gap),
        # The constant that the theorem's bound would need for this model: gap / mean of Ψ/‖F‖.
        "needed_constant": float(np.mean(losses["losses_without"]) - losses["loss"]) / bound,
        "norm_line": _line(places, curves["norms"]),
        "exponents": {
            "norm": interval([exponent(places, entry["norms"]) for entry in measured]),
            "psi": interval([exponent(shares, entry["psi"]) for entry in measured]),
            "psi_inner": interval([exponent(shares[inner], entry["psi"][inner]) for entry in measured]),
        },
    }


def study_stability(
    run: Path, out: Path, *, step: int | None = None, batches: int = 16, device: str = "auto", console: Console
) -> Path:
    """Measure a run's newest checkpoint, or the one at `step`, on held-out text.

    Write result.json and stability.png, and return their folder, which is named after the run and, if given, the step.
    """
    if batches < 1:
        raise ValueError(f"batches is {batches}; a whole number from 1 on is allowed")
    loaded = load_model(run, step)
    model, config, found = loaded.model, loaded.config, loaded.checkpoint
    store = open_data(config, run, console)
    if (trained_on := found.progress().data) != store.fingerprint:
        raise ValueError(
            f"run is {str(run)!r}, trained on data with fingerprint {trained_on}; those at "
            f"{str(store.path)!r} have {store.fingerprint}, and the same are needed"
        )
    settings = replace(config.train, device=device, precision="auto")
    model.to(settings.resolve_device()).eval()
    layers = model.config.layers

    def trained(layer: int) -> Subnetwork:
        return loaded.method.trained([other != layer for other in range(layers)], found.step)

    probe = probe_model(model, trained)
    objective = config.objective.make(store.vocabulary)
    window, isolate = objective.window(config.data.length), config.data.isolate_documents
    held_out = EvalData(store, window, batches * settings.batch, isolate=isolate)
    pieces = {
        f"{domain}-{number}": objective.evaluation(windows)
        for domain in held_out.domains
        for number, windows in enumerate(held_out.windows(domain, settings.batch))
    }
    # Jobs are reused only for the same weights, whose checksums are in the manifest, and the same subnetworks.
    digest = hashlib.sha256((found.path / checkpoint.MANIFEST).read_bytes()).hexdigest()
    run_as = [probe.full.digest, *(trained(layer).digest for layer in range(layers))]
    setting = {"checkpoint": digest, "subnetworks": run_as, "windows": len(held_out), "batch": settings.batch}
    name = f"stability-{run.resolve().name}" + (f"-step-{step}" if step is not None else "")
    with study_folder(out / name) as folder:
        measured = run_jobs(
            folder, setting, list(pieces), lambda key: measure(probe, pieces[key]), console, "stability"
        )
        result = {
            "study": "stability",
            "run": run.resolve().name,
            "step": found.step,
            "config": config.mapping(),
            "model": asdict(model.config),
            "environment": environment(),
            **gather(list(measured.values())),
        }
        write_json(folder / RESULT, result)
        plot([result]).savefig(folder / "stability.png", dpi=150)
    return folder


def _states(probe: Probe, batch: Any, subnetwork: Subnetwork) -> tuple[list[Tensor], float]:
    """Return the hidden state after each running layer, (B, S, D), and the loss."""
    with torch.no_grad(), _recorded(probe.blocks, subnetwork) as states:
        loss = probe.loss(batch, subnetwork).item()
    assert len(states) == subnetwork.size, "a layer that runs was not seen, or seen twice"
    return states, loss


@contextmanager
def _recorded(blocks: Sequence[nn.Module], subnetwork: Subnetwork) -> Iterator[list[Tensor]]:
    """Yield a list that collects what the running blocks return."""
    states: list[Tensor] = []

    def record(_block: nn.Module, _given: Any, output: Any) -> None:
        state = output if isinstance(output, Tensor) else output[0]
        # A copy, since the next block may overwrite it.
        states.append(state.detach().float().clone())

    # Bypassed blocks get no hook: an attached model may run one once, to learn what it returns.
    hooks = [blocks[layer].register_forward_hook(record) for layer in subnetwork.kept]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Return the least-squares line through the points, and the share of their variance that it explains."""
    slope, start = linear_regression(x, y)
    return {"slope": slope, "start": start, "explained": correlation(x, y) ** 2}


def plot(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw norms, Ψ_ℓ/Ψ_1 and the loss that leaving out each layer adds, for one model or several."""
    figure = Figure(figsize=(12, 4.3), layout="constrained", facecolor="white")
    norms, psi, losses = figure.subplots(1, 3)
    for index, result in enumerate(results):
        places = list(range(1, result["layers"] + 1))
        shares = [result["layers"] / place for place in places]
        relative = [value / result["psi"][0] for value in result["psi"]]
        name = str(result.get("run", f"model {index + 1}"))
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        dots = {"color": colour, "marker": marker, "markersize": 4.5}
        line, fits = result["norm_line"], result["exponents"]
        norms.plot(places, result["norms"], linewidth=1.6, label=f"{name}: ℓ^{fits['norm']['mean']:.2f}", **dots)
        straight = [line["start"] + line["slope"] * place for place in places]
        norms.plot(places, straight, color=colour, linewidth=1, linestyle=":")
        psi.plot(shares, relative, linewidth=1.6, label=f"{name}: (L/ℓ)^{fits['psi']['mean']:.2f}", **dots)
        rises = [loss - result["loss"] for loss in result["losses_without"]]
        losses.plot(places, rises, linewidth=1.6, label=f"{name}: mean {np.mean(rises):+.4f}", **dots)
        losses.axhline(float(np.mean(rises)), color=colour, linewidth=1, linestyle=":")
    deepest = max(result["layers"] for result in results)
    claim = [(share / deepest) ** CLAIMED_PSI for share in (1, deepest)]
    psi.plot((1, deepest), claim, color=GREY, linewidth=1, linestyle="--", label="paper: (L/ℓ)^0.12")
    psi.set_xscale("log", base=2)
    psi.set_yscale("log", base=2)
    psi.xaxis.set_major_formatter("{x:g}")
    psi.yaxis.set_major_formatter("{x:g}")
    _finish(norms, "Norm after layer ℓ (dotted: straight line)", "layer ℓ")
    _finish(psi, "Ψ of layer ℓ / Ψ of layer 1", "L/ℓ (layer L left, layer 1 right)")
    losses.axhline(0, color=GREY, linewidth=1, linestyle="--")
    _finish(losses, "Held-out loss added by leaving out layer ℓ", "layer ℓ")
    norms.set_ylim(0)
    return figure


def _finish(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(below, color=INK)
    clean(axes)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
