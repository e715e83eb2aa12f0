"""What a method's own file does not say: when to choose it, and limits that neither its recipe nor its tests show."""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    """``use``: when the method is a good choice. ``limits``: one sentence each."""

    use: str
    limits: tuple[str, ...] = ()


NOTES: dict[str, Note] = {
    "turboquant_prod": Note(
        "Scores that are right on average matter more to you than scores with little noise, as in retrieval.",
        ("At equal bits `turboquant_mse` is often closer to the model: softmax bears a common factor, not noise.",),
    ),
    "turboquant_mse": Note(
        "You want every token packed at once, without calibration, window or wait, at 3 or 4 bits per number.",
        ("No token is exact, the newest included: 2 bits cost a lot.",),
    ),
    "turboquant_rvq": Note(
        "Short contexts, and when nothing may be fitted or wait: every token is packed as it comes. Automatic "
        "configuration chooses it below 2,048 tokens, at 4 bits.",
        ("`bit_width_inlier` counts twice: b means 2 b bits per number.",),
    ),
    "polar": Note(
        "You want angles in place of numbers: no scale per group and no calibration.",
        ("Heads whose size is no multiple of 16 are cut into smaller blocks.",),
    ),
    "qjl": Note(
        "You need the smallest keys with no data at all, and can bear noise in the scores.",
        ("Scores are noisy at the default size of the sketch; `jl_dim` of 2 or 4 times the head costs bits for less.",),
    ),
    "vecinfer": Note(
        "Very few bits per number (2 and less) on a model that you calibrate once.",
        ("Without an artifact, prompts of fewer than 512 tokens use codebooks for normal numbers.",),
    ),
    "spectral": Note(
        "You calibrate once and want most bits where keys and values vary most.",
        (
            "Without an artifact every sequence holds axes of its own: 4 D² bytes per head and tensor.",
            "The source is a preprint of unknown status.",
        ),
    ),
    "kivi": Note(
        "The first method to try: 4 bits cost little, nothing is fitted, trim and batches work, and the newest tokens "
        "are exact. Automatic configuration chooses it, at 2 bits, from 2,048 to 16,384 tokens.",
        ("`residual_length` tokens of keys and of values stay in floats: short texts gain little.",),
    ),
    "kivi_sink": Note(
        "2 or 3 bits on models with attention sinks that are not only the first token.",
        ("Where the first token is the only sink, it does what keeping the first few tokens exact does.",),
    ),
    "svdq": Note(
        "Keys are what you must shrink, and the prompt is long.",
        (
            "Values are not compressed: at most half of the memory can go.",
            "The basis belongs to the sequence: it pays for long prompts only.",
        ),
    ),
    "kitty": Note(
        "Between 2 and 3 bits, when plain 2-bit `kivi` loses too much.",
        ("The first 32 tokens, and up to a page of keys and of values, stay in floats.",),
    ),
    "adakv": Note(
        "A fixed mean of bits (2.5 by default) where heads differ much.",
        ("Bits per head are our design; the paper is about evicting tokens.",),
    ),
    "xquant": Note(
        "Models whose neighbouring layers are alike, or tests of the idea.",
        ("The default takes more memory than 2-bit `kivi`: it adds 4-bit residuals to the shared codes.",),
    ),
    "kvquant": Note(
        "3 or 4 bits on long contexts: levels follow the data, a few outliers stay exact. Automatic configuration "
        "chooses it from 16,384 tokens on.",
        ("Levels are fitted on the first tokens of the text itself, without the paper's gradients.",),
    ),
    "palu": Note(
        "Low rank on a model without norms on its keys, best after a calibration.",
        ("On models that norm keys after their projection (Qwen3, Gemma 3) the basis comes from the sequence.",),
    ),
    "cachegen": Note(
        "You keep prompts on disk: files hold entropy-coded bits, losslessly.",
        ("Differences pay only where neighbouring tokens are much alike.",),
    ),
    "minicache": Note(
        "Deep models whose neighbouring late layers have nearly parallel keys or values.",
        ("Where layers point in different directions everything stays as it came: then nothing is saved.",),
    ),
    "gear": Note(
        "2 bits with the error repaired: when memory is short and quality counts. Automatic configuration chooses it "
        "under memory pressure.",
        ("A low-rank fit per block costs time when the prompt ends.",),
    ),
    "zipcache": Note(
        "Few tokens matter and you want those at 4 bits, the rest at 2.",
        ("Later tokens wait for a whole segment of 96 to 160 in floats.",),
    ),
    "snapkv": Note(
        "Long prompts with a question at their end, answered shortly.",
        (
            "What the question does not ask about may be gone for the next one.",
            "Decoded tokens are only added: memory grows again.",
        ),
    ),
    "streaming_llm": Note(
        "Endless chats and streams of which only the latest part matters: memory stays the same, in prompts too.",
        ("It forgets the middle of a text, by design.",),
    ),
    "h2o": Note(
        "Long answers within a fixed budget: tokens that were attended to stay.",
        ("Sums of attention favour early tokens; `h2o_decay` below 1 forgets slowly.",),
    ),
    "tova": Note(
        "A fixed budget through decoding, with the same tokens in all heads.",
        ("The prompt is cut by its last query alone.",),
    ),
    "pyramidkv": Note(
        "As `snapkv`, where late layers can do with fewer tokens.",
        ("Budgets are set by depth, not by what layers really need.",),
    ),
    "squeeze": Note(
        "A budget for the whole model that layers share by how much they do.",
        ("It needs the residual stream of the model: Gemma 3n is refused.",),
    ),
    "chunkkv": Note(
        "Facts in prompts that should stay whole: neighbouring tokens stay or go together.",
        ("Up to a chunk less one of the budget stays unused.",),
    ),
    "cam": Note(
        "A fixed budget where values of dropped tokens should not be lost outright.",
        ("Nothing is merged when the prompt is cut: merging begins with decoding.",),
    ),
    "xkv": Note(
        "Texts of many thousand tokens, on models whose layers are alike.",
        ("Prompts shorter than 4 tokens per latent are not packed.",),
    ),
    "nsnquant": Note(
        "2 bits without calibration, with one codebook for all models.",
        ("Between one and two windows of tokens stay in floats.",),
    ),
    "knorm": Note(
        "The cheapest choice of tokens: no queries, no calibration, any model.",
        (
            "Models that norm their keys (Qwen3, Gemma 3) give it little to go by.",
            "Set `knorm_recent` (32 to 64) for chats, or the question itself may be dropped.",
        ),
    ),
    "skvq": Note(
        "2 to 4 bits with small parameters: clipped ranges, sinks and a window exact.",
        ("Groups of channels are found in the first tokens, then frozen.",),
    ),
    "qfilters": Note(
        "A fixed budget on models that you calibrate: scores need no attention weights.",
        (
            "Without an artifact the filters follow from the sequence at hand.",
            "Where the budget is a small share of the text it warns, as `qfilters_on_low_retention` says.",
        ),
    ),
    "keyformer": Note(
        "As `h2o`, with noise that spreads the risk of dropping the wrong token.",
        ("Slow on long prompts: noise is drawn for every pair of tokens.",),
    ),
    "morphkv": Note(
        "Long answers of constant size that follow what was said last.",
        ("What the newest tokens do not attend to is lost.",),
    ),
    "kvzip": Note(
        "One long document, many questions: what stays does not depend on the question (`prepare_kvzip`).",
        (
            "The context is run a second time before the first answer.",
            "Heads are padded to the longest of their layer: half of the pairs is not half of the bytes.",
        ),
    ),
    "kvtc": Note(
        "A budget in bits per token, and small files: entropy coded when saved.",
        ("Without an artifact every sequence holds axes of its own: 4 D² bytes per head and tensor.",),
    ),
    "curdkv": Note(
        "Tokens chosen from keys and values alone, on any model.",
        ("The question at the end of a prompt plays no part in the choice.",),
    ),
    "nestedkv": Note(
        "Tokens that stand out from their surroundings matter; no queries are needed to score them.",
        (
            "Only the abstract of the preprint could be read; the formulas are our reading.",
            "Heads are padded to the longest of their layer.",
        ),
    ),
    "amc": Note(
        "Large keys and values are what you want exact; the rest at 8 and 4 bits.",
        ("Large is not important: attention sinks have small values.",),
    ),
    "a2ats": Note(
        "Decoding should read less memory, and there is room for all of it.",
        ("Memory does not shrink: an index comes on top. Pair it with a packing method to save memory.",),
    ),
    "anchorkv": Note(
        "One long prompt, squeezed to a budget in bytes once.",
        ("Tokens after the first prompt are not compressed.",),
    ),
    "rocketkv": Note(
        "Long prompts where a step of decoding should read little: more tokens are held than it reads.",
        ("It holds more than its ratio says: the ratio is of what a step reads.",),
    ),
    "age_tiered": Note(
        "Long chats in which old tokens may fade: 8 bits, then 4, then 2.",
        ("What is needed again from far back has the fewest bits.",),
    ),
}
