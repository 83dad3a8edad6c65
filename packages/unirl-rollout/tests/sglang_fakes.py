"""A fake server with SGLang's HTTP protocol (0.5.23): its paths, fields and answers, without a model.

Field names are those of sglang.srt.managers.io_struct and sampling_params; any other is refused, as SGLang does.
"""

import base64
import hashlib
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

FIELDS = {
    "/generate": {"rid", "input_ids", "image_data", "sampling_params", "return_logprob", "lora_path"},
    "/update_weights_from_disk": {"model_path", "load_format", "flush_cache", "weight_version", "abort_all_requests"},
    "/update_weight_version": {"new_version", "abort_all_requests"},
    "/load_lora_adapter": {"lora_name", "lora_path", "pinned"},
    "/unload_lora_adapter": {"lora_name"},
    "/weights_checker": {"action", "allow_quant_error", "skip_tensor_list", "selector"},
    "/abort_request": {"rid", "abort_all"},
    "/release_memory_occupation": {"tags"},
    "/resume_memory_occupation": {"tags"},
}
SAMPLING = {"temperature", "max_new_tokens", "stop_token_ids", "sampling_seed", "top_p", "top_k", "ignore_eos"}


IMAGE, PIXELS_PER_TOKEN = 40, 16
"""Placeholder token of images, and pixels per token."""


def decoded(uri: str) -> Image.Image:
    """The image in a data URI, as SGLang's load_image reads it."""
    head, data = uri.split(",", 1)
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))


class SGLangFake:
    """Runs the server in threads. `log` has every (path, body), `weights` the last tensors it read, `images` the images
    of requests."""

    def __init__(self, port=0):
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.weights: dict[str, Any] = {}
        self.images: list[list[Image.Image]] = []
        self.version = "default"
        self.adapters: dict[str, dict[str, Any]] = {}
        self.refuses: set[str] = set()
        self.bad_tokens: set[int] = set()
        """Tokens for whose prompts a whole request is refused."""
        self.release = "0.5.23"
        self.max_running = 4
        self.sizes = {"tp_size": 1, "pp_size": 1, "nnodes": 1}
        self.leaves_out: set[str] = set()
        """Parameters that a push does not reach, although it reports success."""
        self.writes: dict[str, Any] = {}
        """Tensors that a push changes in addition to those of its files."""
        self.noise = 0
        self.num_stale = 0
        """Ranks that a push does not reach."""
        self.is_started = True
        self.change = lambda answer: answer
        self.aborted = threading.Event()
        self.waits_for_abort = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.handle(self, {})

            def do_POST(self):
                fake.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def paths(self):
        return [path for path, _ in self.log]

    def handle(self, handler, body):
        path = handler.path
        self.log.append((path, body))
        unknown = set(body) - FIELDS.get(path, set())
        if unknown:
            return self.reply(handler, 422, {"error": f"unknown fields {sorted(unknown)}"})
        if path in self.refuses:
            return self.reply(handler, 400, {"success": False, "message": "it did not fit"})
        match path:
            case "/health_generate":
                return self.reply(handler, 200 if self.is_started else 503, None)
            case "/model_info":
                return self.reply(handler, 200, {"weight_version": self.version})
            case "/server_info":
                return self.reply(handler, 200, self.info())
            case "/weights_checker":
                return self.reply(handler, 200, {"success": True, "message": "Success.", **self.checked(body)})
            case "/generate" if found := self.bad_tokens & {token for ids in body["input_ids"] for token in ids}:
                return self.reply(handler, 400, {"error": {"message": f"no media for tokens {sorted(found)}"}})
            case "/generate":
                return self.reply(handler, 200, self.change(self.generate(body)))
            case "/update_weights_from_disk":
                folder = Path(body["model_path"])
                assert json.loads((folder / "config.json").read_text())
                read = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
                self.weights |= {name: value for name, value in read.items() if name not in self.leaves_out}
                self.weights |= self.writes
                self.version = body["weight_version"]
                return self.reply(handler, 200, {"success": True, "message": "", "num_paused_requests": 0})
            case "/update_weight_version":
                self.version = body["new_version"]
                return self.reply(handler, 200, {"success": True, "message": "", "new_version": self.version})
            case "/load_lora_adapter":
                self.adapters[body["lora_name"]] = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
                loaded = {name: name for name in self.adapters}
                return self.reply(handler, 200, {"success": True, "error_message": "", "loaded_adapters": loaded})
            case "/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
                return self.reply(handler, 200, {"success": True, "loaded_adapters": {}})
            case "/abort_request":
                self.aborted.set()
                return self.reply(handler, 200, None)
            case "/release_memory_occupation" | "/resume_memory_occupation":
                return self.reply(handler, 200, None)
        return self.reply(handler, 404, {"detail": "Not Found"})

    def info(self):
        """What a server says of itself."""
        states = [{"effective_max_running_requests_per_dp": self.max_running}]
        return {"version": self.release, "device": "cuda", "internal_states": states, **self.sizes}

    def checked(self, body):
        """SGLang's own checksums, or fill every parameter with noise."""
        if body["action"] == "reset_tensors":
            self.noise += 1
            skipped = body.get("skip_tensor_list") or ()
            for name, value in self.weights.items():
                if not any(part in name for part in skipped):
                    self.weights[name] = torch.full_like(value, -self.noise)
            return {}
        assert body["action"] == "checksum"
        sums = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in self.weights.items()}
        stale = {name: "as it was" for name in sums}  # of a host that does not read the files of a push
        return {"ranks": [{"checksums": sums}, *[{"checksums": stale}] * self.num_stale]}

    def generate(self, body):
        """Generate tokens that count up from the prompt's last token until a stop token or the limit."""
        is_drawn = any(params["temperature"] for params in body["sampling_params"])  # else instances are compared
        ends_early = self.waits_for_abort and is_drawn and self.aborted.wait(120)
        outputs = []
        self.images = [[decoded(uri) for uri in uris] for uris in body.get("image_data", [])]
        for row, (prompt, params) in enumerate(zip(body["input_ids"], body["sampling_params"], strict=True)):
            assert set(params) <= SAMPLING
            assert not params.get("ignore_eos"), "SGLang would ignore stop_token_ids as well"
            tokens, reason = [], "length"
            while len(tokens) < params["max_new_tokens"] and reason == "length":
                tokens.append(prompt[-1] + 1 + len(tokens))
                if tokens[-1] in params["stop_token_ids"]:
                    reason = "stop"
            reason, tokens = ("abort", tokens[:1]) if ends_early else (reason, tokens)
            meta = {
                "id": body["rid"][row],
                "prompt_tokens": len(self.expanded(prompt, row)),
                "finish_reason": {"type": reason},
                "weight_version": self.version,
                "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            }
            outputs.append({"output_ids": tokens, "meta_info": meta})
        return outputs

    def expanded(self, prompt, row):
        """The prompt with each image's placeholder repeated according to the image's size, as in SGLang."""
        images = iter(self.images[row] if self.images else [])
        tokens = []
        for token in prompt:
            tokens += [token] * (next(images).width ** 2 // PIXELS_PER_TOKEN if token == IMAGE else 1)
        assert next(images, None) is None, "more images than placeholders"
        return tokens

    def reply(self, handler, status, content):
        data = b"" if content is None else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
