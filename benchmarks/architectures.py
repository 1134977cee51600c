"""Every causal language model that the installed transformers knows, as small random weights, trained for three steps
by `shardwise train model.path=...` beside plain transformers.

    python benchmarks/architectures.py [NAME...] [--two NAME...|all] [--json results/architectures.json]

For each name: transformers writes a model of two or three layers with random weights; a process of its own trains it
with transformers' code, AdamW and gradient clipping and nothing of ours but the rows; another one is the real command
in one process, and for the names after --two another with two ranks and `zero=3`. Passes of a name are the same where
no loss is further off than 1e-5. Anything else that counts as an answer is a refusal in three lines. What transformers
itself cannot build or train at this size is called so, and is no answer of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.models.auto.modeling_auto as auto  # noqa: E402
from foreign_models import KINDS, ODD, OTHERS, UNKNOWN_TO_OURS  # noqa: E402

STEPS, BATCH, LIMIT, PATIENCE_S = 3, 4, 1e-5, 120.0
WORDS = [
    f"data.source={ROOT / 'tests/golden/stories.jsonl'}", "data.tokenizer=bytes", "train.seq_len=32",
    f"train.global_batch={BATCH}", "train.micro_batch=2", f"train.steps={STEPS}", "train.eval_batches=1",
    "train.sample_tokens=2", "optimizer.lr=1e-3", "optimizer.schedule=constant", "optimizer.warmup=0",
    "optimizer.weight_decay=0", "memory.precision=fp32", "data.document_mask=false",
]  # fmt: skip
OUR_EXPERTS = ["model.aux_loss_coef=0", "model.bias_update_rate=0"]
"""Experts of ours train by transformers' rule, which is not their default."""

SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "d_model": 32, "n_embd": 32, "n_embed": 32, "embed_dim": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_blocks": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "head_dim": 8, "intermediate_size": 40, "ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_ffn_dim": 40, "n_inner": 40,
    "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "ffn_hidden_size": 40,
    "dense_intermediate_size": 40, "intermediate_size_mlp": 40, "feed_forward_size": 40, "dim_ff": 40, "dff": 40,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "first_k_dense_replace": 1, "zero_expert_num": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "o_lora_rank": 8, "o_groups": 2, "index_n_heads": 2,
    "index_head_dim": 8, "index_topk": 16, "sliding_window": 16, "max_position_embeddings": 64, "n_positions": 64,
    "n_ctx": 64, "rotary_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_dt_rank": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "state_size": 8, "n_groups": 1, "mamba_ngroups": 1,
    "mamba_d_ssm": 64, "lru_width": 32, "conv1d_width": 4, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0, "query_pre_attn_scalar": 8, "embedding_size": 32,
    "word_embed_proj_dim": 32, "embedding_dim": 32, "emb_dim": 32, "d_inner": 40, "d_head": 8, "dim_head": 8,
    "time_step_rank": 4, "kv_channels": 8, "attention_hidden_size": 32, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "global_head_dim": 8, "attention_head_dim": 8,
    "adapter_rank": 4, "num_nextn_predict_layers": 0, "type_vocab_size": 1, "linear_head_dim": 8, "linear_num_heads": 4,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zamba": {"layer_types": ["mamba", "hybrid"], "num_hidden_layers": 2},
    "zaya": {"num_experts_per_tok": 1, "moe_router_topk": 1},
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""What else these need to be small and whole."""

ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
NOT_A_DECODER_BY_DEFAULT = {"is_decoder": True, "is_causal": True}


def values_of(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the model type and the config of the small model of that name."""
    if name in UNKNOWN_TO_OURS:
        kind, values = UNKNOWN_TO_OURS[name]
        return kind, values | {"max_position_embeddings": 64}
    if name in KINDS | OTHERS | ODD:
        return name, (KINDS | OTHERS | ODD)[name]
    known = transformers.CONFIG_MAPPING[name]().to_dict()
    values = {key: value for key, value in SMALL.items() if key in known and isinstance(known[key], int | None)}
    if (
        "kv_lora_rank" in values and "num_key_value_heads" in values
    ):  # every head has keys of its own in latent attention
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
    values |= {key: value for key, value in (ENDS | NOT_A_DECODER_BY_DEFAULT).items() if key in known}
    kinds = known.get("layer_types")
    if isinstance(kinds, list) and kinds:
        values["layer_types"] = list(dict.fromkeys(kinds))[:3] if len(set(kinds)) > 1 else kinds[:2]
        for key in ("num_hidden_layers", "num_layers", "n_layer"):
            if key in values:
                values[key] = len(values["layer_types"])
    return name, values | SPECIAL.get(name, {})


def write(name: str, directory: Path) -> dict[str, Any]:
    quiet()
    kind, values = values_of(name)
    config = transformers.CONFIG_MAPPING[kind](**values)
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).parameters())
    if count > 20e6:
        return {"not_small": f"{count:,} parameters at the sizes of this script"}
    torch.manual_seed(0)
    model = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.save_pretrained(directory)
    return {"parameters": count}


def truth(directory: Path) -> dict[str, Any]:
    """Trains by transformers alone, on the rows that the command takes."""
    from shardwise.config.load import load_config
    from shardwise.data.corpus import open_corpus

    quiet()
    config = load_config(None, WORDS).config
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, seed=config.train.seed, vocab=256, model_dir=None,
                         cache_dir=directory.parent / "data", progress=False)  # fmt: skip
    about = transformers.AutoConfig.from_pretrained(directory)
    if getattr(about, "rescale_every", 0):
        about.rescale_every = 0
    model = auto.AutoModelForCausalLM.from_pretrained(directory, config=about, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=config.optimizer.betas, eps=config.optimizer.eps,
                                  weight_decay=0.0)  # fmt: skip
    losses = []
    for step in range(1, STEPS + 1):
        batch = corpus.train.batch(step, range(BATCH), BATCH)
        optimizer.zero_grad()
        loss = 0.0
        for rows in (slice(0, 2), slice(2, 4)):
            logits = model(input_ids=torch.from_numpy(batch.tokens[rows]), use_cache=False).logits
            targets = torch.from_numpy(batch.targets[rows])
            part = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            (part / batch.num_targets).backward()
            loss += part.item() / batch.num_targets
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        optimizer.step()
        losses.append(loss)
    return {"losses": losses}


def command(directory: Path, layout: str) -> dict[str, Any]:
    """Runs the real command; several ranks are forked from this process."""
    from forked_python import forked_ranks

    from shardwise.cli.main import main
    from shardwise.interop.huggingface.load_save import read_spec

    os.chdir(directory.parent)
    words = [f"model.path={directory}", *WORDS, f"parallel.layout={layout}", f"run.name={layout[:4]}"]
    with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
        spec = read_spec(directory)
        words += OUR_EXPERTS if spec.is_ours and spec.num_experts else []
    with forked_ranks():
        code = main(["train", *words])
    found: dict[str, Any] = {"exit": int(code)}
    with contextlib.suppress(OSError):
        lines = (directory.parent / "runs" / layout[:4] / "metrics.jsonl").read_text().splitlines()
        found["losses"] = [line["loss"] for line in map(json.loads, lines) if "loss" in line and "step_s" in line]
    return found


# Processes ------------------------------------------------------------------------------------------------------------


def in_a_process(work: Callable[..., dict[str, Any]], *words: Any, log: Path) -> dict[str, Any]:
    """Returns what `work` returns in a fork, or how it ended; what it wrote is in `log`."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            answer = json.dumps(work(*words))
            os.write(writing, answer.encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    ended_in_time = select.select([reading], [], [], PATIENCE_S)[0]
    text = os.read(reading, 1 << 20) if ended_in_time else b""
    os.close(reading)
    if not ended_in_time:
        os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if text:
        return json.loads(text)
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
    return {"failed": "no end" if not ended_in_time else f"status {status}", "said": last[0][:300]}


def answer(name: str, with_two: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory, log = Path(folder) / "model", Path(folder) / "log"
        written = in_a_process(write, name, directory, log=log)
        if "parameters" not in written:
            return {"not_built": written.get("not_small") or written["said"]}
        right = in_a_process(truth, directory, log=log)
        found: dict[str, Any] = {"parameters": written["parameters"]}
        if "losses" in right:
            found["transformers"] = right["losses"]
        else:
            found["not_trained_by_transformers"] = right["said"]
        for layout in ["dp=1", *(["dp=2 zero=3"] if with_two else [])]:
            done = in_a_process(command, directory, layout, log=log)
            said = log.read_text(errors="replace")
            found[layout] = done | {"verdict": verdict(done, right.get("losses"), said)}
            if "builder" in said or "transformers" in said:
                found["runs_in"] = "transformers"
            if found[layout]["verdict"] in ("fails", "differs", "is refused"):
                lines = said.strip().splitlines()
                found[layout]["said"] = lines[-3:] if found[layout]["verdict"] == "is refused" else lines[-25:]
        shutil.rmtree(directory, ignore_errors=True)
        return found


def verdict(done: dict[str, Any], right: list[float] | None, said: str) -> str:
    lines = said.strip().splitlines()[-3:]
    if done.get("exit") == 2 and [line[:7] for line in lines] == ["error: ", "  why  ", "  fix  "]:
        return "is refused"
    if done.get("exit") != 0 or len(done.get("losses", [])) != STEPS:
        return "fails"
    if right is None:
        return "trains"
    off = max(abs(mine - theirs) for mine, theirs in zip(done["losses"], right, strict=True))
    done["off"] = off
    return "same" if off <= LIMIT else "differs"


def quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types of transformers; all of them when none is named")
    parser.add_argument("--two", nargs="*", default=[], help="names that two ranks train too, or all")
    parser.add_argument("--json", type=Path, help="a file to add the answers to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.names or [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *UNKNOWN_TO_OURS]
    for module in ("shardwise.cli.main", "shardwise.launch.processes", "shardwise.run.loop", "shardwise.prove.verify"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for name in names:
        begun = time.monotonic()
        found = answer(name, "all" in options.two or name in options.two)
        short = {key: value["verdict"] for key, value in found.items() if key.startswith("dp=")}
        print(f"{name:<28} {short or found} {time.monotonic() - begun:.0f} s", flush=True)
        for value in (found[key] for key in short):
            if value["verdict"] in ("fails", "differs"):
                print(
                    "\n".join(f"    {line}" for line in [str(value.get("off", "")), *value["said"][-12:]]), flush=True
                )
        if options.json:
            stored = json.loads(options.json.read_text()) if options.json.exists() else {}
            answers = stored.get("answers", {}) | {name: found}
            counts = Counter(v["verdict"] for f in answers.values() for k, v in f.items() if k.startswith("dp="))
            counts["cannot be built or is not small here"] = sum("not_built" in f for f in answers.values())
            about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
                     "transformers": transformers.__version__, "limit": LIMIT, "verdicts": dict(counts)}  # fmt: skip
            options.json.write_text(json.dumps(about | {"answers": dict(sorted(answers.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
