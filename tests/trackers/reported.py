"""Reports a short run to a real service, twice: cut off after two rollouts, then resumed. Run by the interpreter of
environments/trackers: reported.py SERVICE FOLDER; prints what the library itself reads back, as JSON."""

import importlib
import json
import sys
import wave
from pathlib import Path

import av
import numpy as np
from PIL import Image

from unirl.tracking.mlflow import MlflowTracker
from unirl.tracking.swanlab import SwanLabTracker
from unirl.tracking.tensorboard import TensorBoardTracker
from unirl.tracking.trackio import TrackioTracker
from unirl.tracking.wandb import WandbTracker, run_id

CONFIG = {"recipe": "worlds/test", "seed": 1, "resume": None, "backend": {"optimizer": {"learning_rate": 3e-4}}}
REWARD = "reward/mean"
ENDS = ("/path", "/audio", "/videos")
"""What W&B calls the parts of an image or a table, of sounds and of videos."""


def tracker(service, folder):
    """A tracker that sends nothing anywhere."""
    return {
        "wandb": lambda: WandbTracker(mode="offline"),
        "swanlab": lambda: SwanLabTracker(mode="offline"),
        "mlflow": lambda: MlflowTracker(tracking_uri=f"file:{folder / 'store'}"),
        "trackio": TrackioTracker,
        "tensorboard": TensorBoardTracker,
    }[service]()


def media(folder):
    """An image, a video and a sound."""
    with av.open(str(folder / "a.mp4"), "w") as video:
        stream = video.add_stream("libx264", rate=4)
        stream.width = stream.height = 16
        for value in (0, 255):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), value, np.uint8), format="rgb24")
            video.mux(stream.encode(frame))
        video.mux(stream.encode(None))
    with wave.open(str(folder / "a.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(np.zeros(800, np.int16).tobytes())
    return Image.new("RGB", (8, 8), "red"), folder / "a.mp4", folder / "a.wav"


def report(service, folder):
    run_dir = folder / "run"
    run_dir.mkdir()
    image, video, sound = media(folder)
    first = tracker(service, folder)
    first.start(CONFIG, run_dir, 0)
    first.log({"eval/reward": 0.5}, 0)
    for step in (1, 2):
        first.log({REWARD: step / 10, "train/loss": float("nan") if step == 1 else 1.0}, step)
    first.image("rollout", image, 2, ["a red square: pass"])
    first.video("rollout", [video], 2, ["a red square moves: pass"])
    first.sound("rollout", [sound], 2, ["silence: pass"])
    first.table("texts", [{"prompt": "1 + 1", "reward": 1.0}, {"prompt": "2 + 2", "answer": "4"}], 2)
    first.alert("zero_gradient", "no weight moves", 2)
    first.close()
    again = tracker(service, folder)
    again.start(CONFIG | {"resume": "auto"}, run_dir, 2)
    for step in (3, 4):
        again.log({REWARD: step / 10}, step)
    again.finish({"num_rollouts": 4})
    again.close()


def of_wandb(folder):
    # W&B itself reads its files only while it uploads them; SwanLab imports them.
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    points, ids, keys, alerts, ends = {}, set(), set(), [], []
    for file in sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(file)
            while (data := reader.scan()) is not None:
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                if record.HasField("run"):
                    ids.add(record.run.run_id)
                if record.HasField("alert"):
                    alerts.append(record.alert.text)
                if record.HasField("exit"):
                    ends.append(record.exit.exit_code)
                if record.HasField("history"):
                    items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                    keys |= {
                        key.removesuffix("/path") for key in items if key.startswith("samples/") and key.endswith(ENDS)
                    }
                    if REWARD in items:
                        points[record.history.step.num] = float(items[REWARD])
    files = {path.suffix for path in (folder / "run" / "wandb").glob("offline-run-*/**/media/**/*") if path.is_file()}
    assert ids == {run_id(folder / "run")}, ids
    return {"points": points, "samples": sorted(keys), "files": sorted(files), "alerts": alerts, "ends": ends}


def of_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"file:{folder / 'store'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "unirl"]
    (run,) = client.search_runs([experiment.experiment_id])
    points = {point.step: point.value for point in client.get_metric_history(run.info.run_id, REWARD)}
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    names, folders = [], [""]
    while folders:
        for item in client.list_artifacts(run.info.run_id, folders.pop()):
            (folders if item.is_dir else names).append(item.path)
    return {
        "points": points,
        "losses": [point.value for point in losses],
        "files": sorted({Path(name).suffix for name in names}),
        "names": sorted(name for name in names if not name.startswith("images/")),
        "parameters": dict(run.data.params),
        "alerts": [run.data.tags["alert.zero_gradient"]],
        "ends": [run.info.status],
    }


def of_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("unirl")
    name = name if isinstance(name, str) else name["name"]
    logs = SQLiteStorage.get_logs("unirl", name)
    points = {line["step"]: line[REWARD] for line in logs if REWARD in line}
    samples = {key: value.get("_type") for line in logs for key, value in line.items() if key.startswith("samples/")}
    alerts = [alert["text"] for alert in SQLiteStorage.get_alerts("unirl")]
    return {"points": points, "samples": samples, "alerts": alerts, "name": name}


def of_swanlab(folder):
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points, ids, samples, alerts, ends = {}, set(), {}, [], []
    files = sorted((folder / "run" / "swanlab").glob("run-*/*.swanlab"))
    for file in files:
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = record_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("start"):
                ids.add(record.start.id)
            if record.HasField("scalar") and record.scalar.key == REWARD:
                points[record.scalar.step] = record.scalar.value.number
            if record.HasField("media"):
                (item,) = record.media.value.items
                samples[record.media.key] = Path(item.filename).suffix
                assert list(file.parent.rglob(item.filename))
            if record.HasField("finish"):
                ends.append(record.finish.state)
    texts = [path.read_text() for path in (folder / "run" / "swanlab").rglob("media/text/*.txt")]
    assert ids == {run_id(folder / "run")}, ids
    alerts = [text for text in texts if "|" not in text]
    return {"points": points, "samples": samples, "alerts": alerts, "ends": ends}


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    runs = EventMultiplexer().AddRunsFromDirectory(str(folder / "run" / "tensorboard")).Reload()
    (name,) = runs.Runs()
    points = {point.step: round(point.value, 6) for point in runs.Scalars(name, REWARD)}
    found = runs.Runs()[name]
    return {"points": points, "images": found["images"], "audio": found["audio"], "texts": sorted(found["tensors"])}


if __name__ == "__main__":
    service, folder = sys.argv[1], Path(sys.argv[2])
    report(service, folder)
    sys.stdout.write("\n" + json.dumps(globals()[f"of_{service}"](folder)) + "\n")
    importlib.invalidate_caches()
