"""Tiny files in the layout that each set is published in."""

import io
import json
import zipfile
from pathlib import Path

import pyarrow
from PIL import Image
from pyarrow import parquet

WISE_KEYS = ("Prompt", "Explanation", "Category", "Subcategory")


def picture(colour, size=(24, 16), kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def pickscore(folder):
    write_text(folder / "dataset/pickscore/train.txt", "a cat\n a dog \na cat\n\na  dog\nmúsica, 猫\n")
    write_text(folder / "dataset/pickscore/test.txt", "a horse\na cow\n")


def hpdv2(folder):
    rows = [
        {"prompt": text, "human_preference": [1, 0], "image_path": ["a", "b"]} for text in ("x", "y", "x", "anime 3")
    ]
    write_text(folder / "train.json", json.dumps(rows))
    for style in ("anime", "concept-art", "paintings", "photo"):
        prompts = [f"{style} {number}" for number in range(120)] + [f"{style} 1"]
        write_text(folder / f"benchmark/{style}.json", json.dumps(prompts))


def wise_rows(name, num=40):
    return [
        dict(zip(WISE_KEYS, (f"{name} {number}", f"it means {number}", name, "sub"), strict=True))
        | {"prompt_id": number}
        for number in range(num)
    ]


def wise(folder):
    for name in ("cultural_common_sense", "spatio-temporal_reasoning", "natural_science"):
        write_text(folder / f"data/{name}.json", json.dumps(wise_rows(name)))


def preferences(folder):
    row = {
        "caption": "a cat",
        "jpg_0": picture("red", (800, 600), "JPEG"),
        "jpg_1": picture("blue", (512, 512), "JPEG"),
    }
    labels = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
    rows = [{**row, "caption": f"cat {i}", "label_0": a, "label_1": b} for i, (a, b) in enumerate(labels)]
    write_table(folder / "data/train-00003-of-00645-b66ac786bf6fb553.parquet", rows)


def captioned(folder):
    """Captions 25 and 27 are held out by their hash."""
    rows = [
        {"caption": f"cat {number}", "jpg_0": framed("red"), "jpg_1": framed("blue")}
        | {"label_0": first, "label_1": 1 - first}
        for number, first in ((24, 1.0), (24, 1.0), (25, 0.5), (26, 0.0), (27, 1.0))
    ]
    write_table(folder / "data/train-00000-of-00645-b66ac786bf6fb553.parquet", rows)


def framed(colour, size=(48, 48)):
    """An image of one colour in a white frame."""
    canvas = Image.new("RGB", size, "white")
    canvas.paste(colour, (size[0] // 4, size[1] // 4, 3 * size[0] // 4, 3 * size[1] // 4))
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()


def dapo_row(problem, answer):
    turns = [{"content": f"Solve.\n\n{problem}", "role": "user"}]
    return {"data_source": "math_dapo", "prompt": turns, "reward_model": {"ground_truth": answer, "style": "rule"}}


def dapo_math(folder):
    problems = [("1+1", "2"), ("2+2", "4"), ("1+1", "2"), ("3+3", "6"), ("3+3", "7")]
    write_table(folder / "data/dapo-math-17k.parquet", [dapo_row(*each) for each in problems])


def aime24(folder):
    rows = [{"ID": "2024-I-1", "Problem": "Find x.", "Solution": "...", "Answer": 204}]
    write_table(folder / "aime_2024_problems.parquet", rows)


def gsm8k(folder):
    row = {"question": "How many clips?", "answer": "She sold 48/2 = <<48/2=24>>24.\nTogether\n#### 1,024"}
    for split in ("train", "test"):
        write_table(folder / f"main/{split}-00000-of-00001.parquet", [row | {"question": f"How many clips? ({split})"}])


def math(folder):
    for subject, answer in (("algebra", "\\frac{1}{2}"), ("geometry", "x=3")):
        solution = f"First \\boxed{{7}}, no: $\\boxed{{{answer}}}$."
        row = {"problem": f"Find it by {subject}.", "level": "Level 5", "type": subject, "solution": solution}
        write_table(folder / f"{subject}/train-00000-of-00001.parquet", [row])


def geo3k_archive(path, problems):
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.stem
    with zipfile.ZipFile(path, "w") as archive:
        for number, problem in problems.items():
            archive.writestr(f"{name}/{number}/data.json", json.dumps(problem))
            archive.writestr(f"{name}/{number}/img_diagram.png", picture((int(number) % 255, 0, 0)))
            archive.writestr(f"{name}/{number}/img_problem.png", picture("white"))


def geo3k_problem(text="Find x.", answer="C"):
    return {"problem_text": text, "choices": ["1", "2", "3", "4"], "answer": answer, "compact_text": "x", "id": 3}


def geo3k(folder):
    geo3k_archive(folder / "data/geometry3k/train.zip", {"10": geo3k_problem(), "9": geo3k_problem("Find $y$.", "A")})
    geo3k_archive(folder / "data/geometry3k/test.zip", {"2401": geo3k_problem()})


def edit_rows(num=30):
    rows = []
    for number in range(num):
        image = {"bytes": picture((number, 2 * number, 7)), "path": f"{number}.png"}
        for language, text in (("en", f"make it {number}"), ("cn", "ni hao"), ("en", "remove it")):
            rows.append(
                {"task_type": "subject-remove", "instruction": text, "instruction_language": language}
                | {"key": f"{number}", "input_image_raw": image, "input_image": image}
            )
    return rows


def image_edit(folder):
    rows = edit_rows()
    write_table(folder / "data/train-00000-of-00002.parquet", rows[:40])
    write_table(folder / "data/train-00001-of-00002.parquet", rows[40:])


def geneval_row(prompt, tag, *include, **more):
    return {"tag": tag, "include": [{"class": name, "count": 1} for name in include], **more, "prompt": prompt}


def write_lines(path, rows):
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def geneval_benchmark(folder):
    rows = [geneval_row("a photo of a bench", "single_object", "bench")]
    rows.append(geneval_row("a photo of a dog and a cat", "two_object", "dog", "cat"))
    write_lines(folder / "prompts/evaluation_metadata.jsonl", rows)


def geneval2(folder):
    pairs = [["How many bicycles are in the image?", "four"], ["Are the bicycles white?", "Yes"]]
    row = {"prompt": "four white bicycles", "atom_count": 2, "vqa_list": pairs, "skills": ["count", "attribute"]}
    write_lines(folder / "geneval2_data.jsonl", [row])


def hpdv2_benchmark(folder):
    for style in ("anime", "concept-art", "paintings", "photo"):
        write_text(folder / f"benchmark/{style}.json", json.dumps([f"{style} 0", f"{style} 1", f"{style} 0"]))


def wise_benchmark(folder):
    wise(folder)
    rows = wise_rows("when", 2)
    rows[0]["Subcategory"] = "Longitudinal time"
    write_text(folder / "data/spatio-temporal_reasoning.json", json.dumps(rows))


def partiprompts(folder):
    lines = ["Prompt\tCategory\tChallenge\tNote", "bond\tAbstract\tBasic\tBiology", 'a "sign"\tArtifacts\tWriting\t']
    write_text(folder / "PartiPrompts.tsv", "\n".join(lines) + "\n")


def dpg(folder):
    head = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    rows = [
        '0,"A cat, asleep",,1,0,entity,whole,entity - whole (cat),Is there a cat?',
        '0,"A cat, asleep",,2,1,attribute,state,"attribute - state (cat, asleep)",Is the cat asleep?',
        "7,A red box,,1,0,entity,whole,entity - whole (box),Is there a box?",
    ]
    write_text(folder / "dpg_bench/dpg_bench.csv", "\n".join([head + "question_natural_language", *rows]) + "\n")


def math500(folder):
    row = {"problem": "What is $1+1$?", "solution": "...", "answer": "2", "subject": "Algebra", "level": 1}
    write_lines(folder / "test.jsonl", [row | {"unique_id": "test/algebra/1.json"}])


def gpqa(folder):
    head = "Pre-Revision Question,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3"
    rows = ["x,What is 1?,one,two,three,four,Physics", '"x, y",What is 2?,two,one,three,four,Chemistry']
    write_text(folder / "gpqa_diamond.csv", "\n".join([f"{head},High-level domain", *rows]) + "\n")


def vbench(folder):
    rows = [{"prompt_en": "In a still frame, a stop sign", "dimension": ["temporal_flickering"]}]
    rows.append({"prompt_en": "Close up of grapes", "dimension": ["overall_consistency", "aesthetic_quality"]})
    style = {"appearance_style": {"appearance_style": "Van Gogh style"}}
    rows.append({"prompt_en": "A beach, Van Gogh style", "dimension": ["appearance_style"], "auxiliary_info": style})
    write_text(folder / "vbench/VBench_full_info.json", json.dumps(rows))


BENCHMARKS = (
    *(geneval_benchmark, geneval2, hpdv2_benchmark, wise_benchmark, partiprompts, dpg, math500, gpqa, vbench),
)
PUBLISHED = {
    each.__name__: each
    for each in (pickscore, hpdv2, wise, preferences, dapo_math, aime24, gsm8k, math, geo3k, image_edit, *BENCHMARKS)
} | {"picture_motion": image_edit, "holes": captioned, "edges": captioned}


def publish(name: str, folder: Path) -> Path:
    """Write the files of a set below `folder` at their paths in the repository; returns the folder."""
    PUBLISHED[name](folder)
    return folder
