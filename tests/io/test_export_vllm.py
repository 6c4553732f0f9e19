"""The export of SmolLM2 in vLLM: needs an interpreter that has it, which ``YATT_VLLM_PYTHON`` names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

MODEL = Path("models/SmolLM2-135M-Instruct")  # as tools.convert_hf wrote it
PYTHON = os.environ.get("YATT_VLLM_PYTHON", "")
PROMPT = "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n"
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True)
    found = llm.generate([sys.argv[2]], SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    print("FOUND " + json.dumps(list(found[0].outputs[0].token_ids)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="YATT_VLLM_PYTHON names no interpreter that has vLLM")
@pytest.mark.skipif(not MODEL.exists(), reason="no SmolLM2 here; make quickstart fetches it")
def test_vllm_writes_what_transformers_writes(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    program = tmp_path / "generate.py"
    program.write_text(PROGRAM, "utf-8")
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, str(program), str(MODEL.resolve()), PROMPT],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        expected = model.generate(**inputs, do_sample=False, max_new_tokens=24)[
            0, inputs["input_ids"].shape[1] :
        ].tolist()
    assert json.loads(line.removeprefix("FOUND ")) == expected
