"""Sample text of many kinds, written for this project, to compare tokenizers on.

It contains prose, code, numbers, whitespace, chat, markup and other scripts, because tokenizers differ on these.
"""

# ruff: noqa: RUF001  # Easily confused characters are part of the sample.

import json

SAMPLE = (
    "The harbour was quiet that morning, and nobody had expected the ferry to leave on time.",
    "She couldn't say why the letter hadn't arrived; it'd been posted, they'd told her, a week ago.",
    "Measurements were repeated three times, averaged, and compared with those of the previous year.",
    "“Is that all?” he asked — but the answer, as so often, was more complicated than the question.",
    "A tokenizer cuts text into pieces; another one cuts the same text elsewhere, and ids lose their meaning.",
    "Unfortunately, internationalisation is a word that hardly any vocabulary holds in one piece.",
    "WARNING: DO NOT SWITCH OFF THE MACHINE WHILE THE LIGHT IS BLINKING!",
    "The mitochondria, the cytoskeleton and the endoplasmic reticulum were stained separately.",
    "Rain, rain, and more rain: the river rose by forty centimetres overnight.",
    "Dear Dr Whitfield, thank you for your e-mail of 3 March; I'm happy to confirm the appointment.",
    "In 1969, 600,000,000 people watched; by 2024 the figure would be called 0.6 billion.",
    "3.14159265358979 2.71828 1e-9 6.022e23 0xDEADBEEF 0b1011 1_000_000 -17 +4.5%",
    "Call +44 20 7946 0958 or write to info@example.org before 17:30 on 2025-11-30.",
    "Total: $1,299.99 (incl. 19% VAT), i.e. €1.204,17 or ¥195,300.",
    "12345 67890 123 45 6 7890123456789 00:00:01.500 192.168.0.1 v2.10.3-rc1",
    "def moving_average(values, window=3):",
    "    if window <= 0:",
    '        raise ValueError(f"window must be positive, not {window}")',
    "    totals = [sum(values[i : i + window]) for i in range(len(values) - window + 1)]",
    "    return [total / window for total in totals]",
    "",
    "class LinkedList(Generic[T]):",
    "    def __init__(self, items: Iterable[T] = ()) -> None:",
    "        self._head: Node[T] | None = None",
    "        for item in items:",
    "            self.append(item)  # keeps the order",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }",
    "const user = await fetch(`/api/users/${id}`).then((r) => r.json());",
    "SELECT name, COUNT(*) AS n FROM orders WHERE total >= 100 GROUP BY name ORDER BY n DESC;",
    'fn main() -> Result<(), Box<dyn Error>> { println!("{:?}", args); Ok(()) }',
    "git commit -m 'Fix off-by-one' && git push origin HEAD:refs/heads/main",
    'if [ -f "$HOME/.profile" ]; then . "$HOME/.profile"; fi',
    '#include <stdio.h>\nint main(void) {\n\tprintf("hello\\n");\n\treturn 0;\n}',
    '{"id": 7, "tags": ["a", "b"], "nested": {"ok": true, "value": null}}',
    '<div class="card"><h2>Title</h2><p>Some <b>bold</b> text&nbsp;here.</p></div>',
    "| column | value |\n| --- | ---: |\n| alpha | 0.05 |",
    "## Heading\n\n* first item\n* second item\n    * nested\n\n```python\nprint(1)\n```",
    "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$",
    "two  spaces   three    four\ttab\t\ttwo tabs \n\n\n three lines down ",
    "user: What is the capital of Peru?\nassistant: Lima.",
    "<s>[INST] Hello [/INST] Hi! </s><|im_start|>user\nHey<|im_end|>",
    "https://www.example.com/path/to/page?query=tokenizer&lang=en#section-2",
    "...!!! ??? --- *** ### $$$ @@@ ~~~ \\\\ // || && == != <= >= ->",
    "Der Zug nach Köln fährt um halb acht von Gleis drei; bitte nicht über die Gleise gehen.",
    "L'été dernier, nous avons déjeuné près de la forêt, où l'air était plus frais qu'ailleurs.",
    "Mañana lloverá en el norte, según el pronóstico; ¿llevarás paraguas?",
    "Non c'è più tempo: il treno è già partito dalla stazione.",
    "Zażółć gęślą jaźń, a potem wróć przed świtem.",
    "Türkiye'de kış aylarında kar yağışı sık görülür.",
    "Chiều nay trời mưa to, nên chúng tôi ở nhà đọc sách.",
    "Сегодня утром поезд опоздал на двадцать минут из-за снега.",
    "Η θάλασσα ήταν ήρεμη και ο ουρανός καθαρός.",
    "הרכבת מאחרת היום בעשרים דקות בגלל השלג.",
    "وصل القطار متأخرا عشرين دقيقة بسبب الثلوج.",
    "आज सुबह ट्रेन बीस मिनट देर से आई।",
    "รถไฟมาช้ายี่สิบนาทีเพราะฝนตกหนัก",
    "今天早上火车因为下雪晚点了二十分钟。",
    "今朝の電車は雪のため二十分遅れました。カタカナとひらがなも。",
    "오늘 아침 기차는 눈 때문에 이십 분 늦었습니다.",
    "naïve café ﬁnal ① ½ ℃ Å Å e\u0301 ÅNGSTRÖM ＦＵＬＬ ｗｉｄｔｈ",
    "👍🏽 👩\u200d👩\u200d👧 🇩🇪 ✓ → ∑ ∀x∈ℝ: x² ≥ 0",
)

_NEGATIVES = 9


def sample_queries() -> str:
    """Return queries for a retrieval task in JSON Lines: to find the second half of a sentence by its first half."""
    halves = [
        (words[: len(words) // 2], words[len(words) // 2 :]) for words in map(str.split, SAMPLE) if len(words) > 7
    ]
    ends = [" ".join(end) for _, end in halves]
    rows = [
        {
            "query": " ".join(start),
            "positives": [ends[at]],
            "negatives": [ends[(at + step) % len(ends)] for step in range(1, _NEGATIVES + 1)],
        }
        for at, (start, _) in enumerate(halves)
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
