"""The examples in the help of each verb. A test parses every one of them, and a verb without any fails it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A command line that works as it stands, and what it is for."""

    command: str
    why: str


def examples_of(verb: str) -> tuple[Example, ...]:
    """The examples of a verb by its words, such as `bench prefill`; of `kit` itself by none."""
    return tuple(Example(f"kit {rest}", why) for rest, why in EXAMPLES.get(verb, ()))


TWO = "--nodes spark1,spark2"

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("demo --install-engine", "try it here, without a GPU: build, serve, check, clean up"),
        (f"init {TWO}", "two machines of your own: a cluster file and a recipe that fit them"),
        ("up recipe.yaml --nodes cluster.yaml", "serve it: image and weights to the nodes, then a checked answer"),
        ("status --nodes cluster.yaml --watch", "see what runs"),
    ),
    # ---- start here
    "demo": (
        ("demo --install-engine", "on this machine; installs Docker's engine from Debian when there is none"),
        ("demo --nodes spark1 --keep", "on another machine, and leave both models serving"),
    ),
    "init": (
        (f"init {TWO}", "ask what to serve, of what fits two machines"),
        ("init --nodes local --model demo --out try --yes", "without questions, into the folder try"),
    ),
    "doctor": (
        (f"doctor {TWO}", "look at the nodes alone"),
        ("doctor glm-5.3-flash-2x-spark --nodes cluster.yaml", "and whether this recipe would serve there"),
    ),
    "plan": (
        ("plan glm-5.3-flash-2x-spark", "on machines as they are sold"),
        (f"plan glm-5.3-flash-2x-spark {TWO} --set serve.max_num_seqs=8", "on real ones, with a key changed"),
    ),
    # ---- serve
    "build": (
        ("build demo", "on this machine's engine"),
        (f"build demo-tp2 {TWO}", "on the first node, then copied to the second"),
        ("build demo --explain", "what changed since the image that is there"),
    ),
    "up": (
        ("up demo", "one rank, on this machine"),
        (f"up demo-tp2 {TWO}", "a rank on each of two nodes"),
        (f"up demo-tp2 {TWO} --dry-run", "what each rank would get, and start nothing"),
    ),
    "wait": ((f"wait demo-tp2 {TWO} --timeout 600", "after a reboot: until it answers again, 10 minutes at most"),),
    "status": (
        (f"status {TWO}", "everything that stands there"),
        (f"status demo-tp2 {TWO} --watch", "one deployment, renewed every 2 s"),
    ),
    "dash": (
        (f"dash {TWO}", "open the address that it prints in a browser; Ctrl-C ends it"),
        (f"dash demo-tp2 {TWO} --port 9090", "one deployment, on a port of your choice"),
    ),
    "logs": (
        (f"logs demo-tp2 {TWO} --follow", "all ranks as they speak; Ctrl-C leaves them running"),
        (f"logs demo-tp2 {TWO} --since 10m", "of the last ten minutes"),
        (f"logs demo-tp2 {TWO} --post-mortem", "who died first, and why"),
    ),
    "restart": ((f"restart demo-tp2 {TWO}", "with the same recipe, or what it says by now"),),
    "down": (
        (f"down demo-tp2 {TWO}", "stop it on both nodes"),
        (f"down demo-tp2 {TWO} --volumes", "and forget the compile caches"),
    ),
    "rollback": (
        (f"rollback demo-tp2 {TWO}", "to the image before this one"),
        (f"rollback demo-tp2 {TWO} --to 0123456789ab", "to a stamp that `kit image status` shows"),
    ),
    # ---- recipes
    "recipe": (
        ("recipe list", "what comes with the kit"),
        ("recipe show demo-tp2", "every key of one, with where its value comes from"),
    ),
    "recipe list": (("recipe list", "names, purposes and machines"),),
    "recipe show": (("recipe show demo-tp2 --set serve.port=9000", "with a key changed, and defaults filled in"),),
    "recipe check": (
        ("recipe check my.yaml", "every fault with its line and column"),
        ("recipe check 'recipes/*.yaml' --json", "several, for a program"),
    ),
    "recipe schema": (("recipe schema", "for an editor: > recipe.schema.json"),),
    "recipe export": (
        ("recipe export demo-tp2 --as v2 --out demo-tp2.yaml", "for sparkrun, with the image that `kit build` makes"),
        ("recipe export glm-5.3-flash-2x-spark --as v1 --container vllm-node", "for eugr's launcher, and its image"),
    ),
    "recipe import": (("recipe import their-recipes --out recipes-here", "a folder of another launcher's"),),
    "lock": (
        ("lock demo", "every input of the image, by hash"),
        ("lock --update demo", "look versions and wheels up anew"),
    ),
    "render": (
        (f"render demo-tp2 {TWO} --out deploy", "compose files, to read or to run by hand"),
        (f"render demo-tp2 {TWO} --diff", "what differs between the ranks"),
    ),
    "export": ((f"export compose demo-tp2 {TWO} --out deploy", "for `docker compose`"),),
    "export compose": ((f"export compose demo-tp2 {TWO} --out deploy", "one folder for each node"),),
    "export docker-run": ((f"export docker-run demo-tp2 {TWO} --out deploy", "scripts of plain `docker run`"),),
    "export kubernetes": (
        ("export kubernetes demo-tp2 --nodes local,local --image registry.lan/exl3kit:1 --claim models",
         "a LeaderWorkerSet; pipe it into `kubectl apply -f -`"),
    ),
    "export systemd": ((f"export systemd demo-tp2 {TWO} --out deploy", "units that start at boot"),),
    # ---- images and weights
    "fetch": (
        ("fetch demo", "all that the image is built from; `kit build --offline` then needs no network"),
        ("fetch demo demo-tp2", "of two recipes"),
    ),
    "image": ((f"image status demo {TWO}", "which node has which image, and whether it is today's"),),
    "image status": (
        (f"image status {TWO}", "every image of the kit"),
        (f"image status demo {TWO}", "and whether all nodes have this tree's"),
    ),
    "image prune": (
        (f"image prune {TWO} --dry-run", "what would go"),
        (f"image prune {TWO} --keep 2", "keep the newest two, and what is in use"),
    ),
    "weights": (("weights verify demo", "whether the weights here are whole"),),
    "weights fetch": (
        ("weights fetch glm-5.3-flash-2x-spark --nodes spark1", "into that node's Hugging Face cache"),
        ("weights fetch my.yaml --token-file token", "a gated model"),
    ),
    "weights verify": (
        (f"weights verify demo-tp2 {TWO}", "index, headers and sizes, on each node"),
        (f"weights verify demo-tp2 {TWO} --full-hash", "every byte"),
    ),
    "weights sync": ((f"weights sync demo-tp2 {TWO}", "from the node that has them to the one that lacks them"),),
    "bundle": (("bundle save demo.tar demo", "all that a site without a network needs"),),
    "bundle save": (
        ("bundle save demo.tar demo --models", "images, their sources, the kit's wheels and the weights"),
        ("bundle save image.tar demo --no-sources --no-kit", "the built image alone"),
    ),
    "bundle load": ((f"bundle load demo.tar {TWO}", "check everything, then load the images there"),),
    "models": (("models synth --out big --like qwen3-moe", "a checkpoint of random bits, to see whether it fits"),),
    "models synth": (
        ("models synth --out big --like config.json", "in the shapes of a model's own configuration"),
        ("models synth --out small --like qwen3 --layers 2 --rates 2.5,4", "two layers, two rates in turn"),
    ),
    # ---- prove and measure
    "receipts": ((f"receipts demo-tp2 {TWO}", "what each rank loaded and ran, side by side"),),
    "verify": (("verify symbols --build", "compile the kernels and read what is in them; no GPU needed"),),
    "verify symbols": (
        ("verify symbols --build", "compile the headline recipe's kernels and read them"),
        (f"verify symbols glm-5.3-flash-2x-spark {TWO}", "an image's kernels against the nodes' GPUs"),
    ),
    "overlay": (("overlay check", "whether the pinned vLLM is what the overlay needs"),),
    "overlay check": (("overlay check --wheel wheels", "of a vLLM in the folder wheels"),),
    "overlay render": (("overlay render demo --out patches", "the diffs that the image's build applies"),),
    "parity": ((f"parity glm-5.3-flash-2x-spark {TWO} --b exl3.tier=legacy", "does another tier say the same?"),),
    "bench": (
        ("bench selftest", "does the gate refuse what it must?"),
        (f"bench prefill demo-tp2 {TWO}", "of what is up"),
    ),
    "bench prefill": (
        (f"bench prefill demo-tp2 {TWO} --rungs 8K,64K", "cold prompts of two lengths"),
        ("bench prefill --url http://127.0.0.1:8000/v1", "of any server"),
    ),
    "bench decode": ((f"bench decode demo-tp2 {TWO} --streams 1,4", "one answer at a time, then four"),),
    "bench ab": (
        (f"bench ab glm-5.3-flash-2x-spark {TWO} --a exl3.tier=sorted --b exl3.tier=grouped", "two tiers"),
        (f"bench ab demo-tp2 my.yaml {TWO} --boots 7", "two recipes, over seven boots"),
    ),
    "bench load": ((f"bench load demo-tp2 {TWO} --levels 1,8,32", "by requests at once"),),
    "bench mnbt": ((f"bench mnbt demo-tp2 {TWO} --values 1K,2K,4K", "which chunk size gives most"),),
    "bench profile": ((f"bench profile demo-tp2 {TWO} --tokens 8192", "where the GPU's time goes"),),
    "bench kernels": ((f"bench kernels glm-5.3-flash-2x-spark {TWO} --only K1,K4", "two bars, on each node"),),
    "bench selftest": (("bench selftest", "recorded cases, and a server of known speed"),),
    "bench report": (("bench report bench/20260131T120000Z-prefill", "a page and plots of one campaign"),),
    "bench figures": (("bench figures --check", "whether the documents' figures still agree"),),
    # ---- this program
    "report": (
        (f"report demo-tp2 {TWO}", "one archive: doctor, status, receipts, logs, locks; look into it, then send it"),
        ("report --hide-home", "of this machine alone, without your name"),
    ),
    "completion": (("completion bash", "the script; `kit completion bash --help` says where it goes"),),
    "completion bash": (("completion bash", "try it at once: source <(kit completion bash)"),),
    "completion zsh": (("completion zsh", "try it at once: source <(kit completion zsh)"),),
    "completion fish": (("completion fish", "try it at once: kit completion fish | source"),),
}  # fmt: skip
