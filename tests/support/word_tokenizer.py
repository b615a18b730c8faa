"""A tokenizer whose id i is the word `w<i>`, for engines without models."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def word_tokenizer(num_words: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(num_words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
