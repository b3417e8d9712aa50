"""Frames that the reference program made (zstd 1.5.4), of each kind of block and literals."""

from __future__ import annotations

import random

import pytest

from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, ProblemError
from cxlfs.checkpoint.zstd import inflate

TEXT = b"A checkpoint is complete when all of it is there, and damaged when some of it is not "
TEXT += b"what was written. "
NUMBERS = "".join(str(n * n) for n in range(900)).encode()
FRAMES = {
    "nothing 19": (b"", "28b52ffd2000010000"),
    "raw 19": (
        bytes(range(100)),
        (
            "28b52ffd0068210300000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20"
            "2122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a"
            "4b4c4d4e4f505152535455565758595a5b5c5d5e5f60616263"
        ),
    ),
    "one byte many times 19": (b"x" * 100_000, "28b52ffd00684d0000087801009c86391002"),
    "text 1": (
        TEXT * 9,
        (
            "28b52ffd00489d0200d2851115a0a73900523b22b27f11f99f09ffb3828f4855ac010d9c7f1bb287b2a7"
            "ca1ecf054fcf951d2650a1d171548007d77bacb70eb08450cf95f54d4c41d163fd199a8270890a020200"
            "6aaaa1f691366506"
        ),
    ),
    "text 19": (
        TEXT * 9,
        (
            "28b52ffd006875020022450f11b0eb0032b39239a6655a4e5a5e8fc954040ef95dd49e1d3e2f9ee7d5fc"
            "52476e702131493478fb59e4a2560a9d3fcfdf2bb674d8216f226569fc0c8b04006aaaa1b6a43681d404"
            "fb35c9"
        ),
    ),
    "numbers 3": (
        NUMBERS,
        (
            "28b52ffd0058ad42004a00bd1a08c07724a170b96a9ea401a301a9017515e0496029e8497415b317b221"
            "1eaf1e754c6c342159629c446bc7ef8820231cd2f8b0510ec40c10d2199d2fce5858b4085a6199e294b7"
            "c357ea74beb40ce9475287dd205d5fa23744dbb763b4d2da8da135a1efb086b241af17d76ad4a9aa2475"
            "f2a1e2e19a81a0060c167829508f419a6194801602ee17fc280459700cc0a700e50066214825ac22743c"
            "386160b92068818582f36727ce95a7f4e11cc392c3cf081d210c52e88f7987d9d294831b06eb97af4b03"
            "9441959e00af02ab01a7212792d5c7cba307a341c4b7623d71339fe46f84afd577cbccef2cc899e3b28f"
            "656565f364d2dd99679958d0310bc4cec53ad34e5a571ef631cc51589030ffdc2d5c1bdc08dc66b6dadb"
            "dbcdc02d36da65adaa365193a44df3ca1f1fd40d33afa7ee6c38d266bcb42277880f12a438249f71299e"
            "c352bdd21df97c5824820e4be384e82c5685f4ced2d2fdb40e6890f5d5fbd00e8c02926153a8015e8261"
            "101478e735ac84932905a7b2025e2445c3f7ce6ad9c693bc31d67637cce7829c63fb68a5365ffa3a1d39"
            "c5e2a02d7146a76ba5ce50c2870e06e9ef5ebb71d236f56b087aef141739ff63399ad131d9e833c61b3a"
            "b685710c8e9237d672f19d11312811bd59bc18620515a782c4c9132b9178cd3feff305359f61f2bdf457"
            "437c9b16be51f8b5b3efbe1ee4670e98d9a7322bedd92c3193ded93a83d9099c59ba9959e4b2f31ad94a"
            "9149b5c84aa9ec3320730844e6c3647748d6cabdf11b6f43f1eada7b1d9e61ea0545f05e79de34f224f1"
            "b1aa13bb378e9881117bdb586d886d86111b61b13614bbe59dff69e7a8741f3ba25b0d5d67d89d636781"
            "7541abb3cc61e70eebc0c0560bc0e61956360a731c607e09bb65b056838d2018aede706f853388b9a0cc"
            "7910dce572d5819b08dc34e3aa8dbb2ace936f417d33c06cafef6d436f92631bdfad65b73b60f3878c6d"
            "1f6a9be39af4d1568ed609d1ce5bb3d0d22caf7642b58e415b059a5499566edaa7d21cf307f9fb31bf2f"
            "6f413eca378dbfec0d860705f7ca5fb357dc27eb92f4a99f6a662ece5032867ade89a919b371475a670c"
            "98f69c1b38be6c82dc38acf94853c665fe88d49175443a149925e8108b42cea8740eb216443a65064a39"
            "930f270e910429b977b71e8f1b4b166f247e651b221c54d88bfa52ae63c46eb9b02b95eeaab91d3f7ac2"
            "442d7734e8885ad8e8794674a5a2d2a79d43da926e3fd3d611d006c9d61fb56f3950c901ddb0d0fa0641"
            "833aeb89b057cd560b761a603b716cf5af9767f540d6a0bc1aa4eb5b58eb71dd8c56c9574718b595a8b7"
            "84eab76a90a03a2cb5ec0ff3e620dd3f74a0877370b0ccfe19e88c0756c780e4c140f90d7cac01472f10"
            "e408f8b7c02d21d046054600016914d88c046adff0760c068a21281b7c190c5569983883a49980ca1270"
            "d5011e2320a806188601af17b0e10bd2a630de8556a270470b3e4021a8153e73805206600e01906a8095"
            "01d05101ce13c02203b0f4841386d09998205980509a844f47708008417ee06b06d04e0c46e960530e6a"
            "d8e0a506865d165c13824a2a980c02983a4105125cfce96d7e1a1ee73b3d6b81736387ceb61fd2a7ccd0"
            "b1187ed46129180ed7b9b023233c4584165b484b547806083be5e46609637e28a6790fcc7634c7cde646"
            "0fd69ae02b091ae468f012042b31829214642f49e9c9511ad4f21594b5584e5339eec07603bc4f06d0c1"
            "023f04600904ce30a05401d79eec74c83384b484c9a083b4b8e42940768424a5134753d59a6b434d50d3"
            "1878b9d4337091c6cb08bab43123b778c47f478284114737f2f145ca8b8848adc86a8a74462216108b65"
            "c0728e960ec8b27a42a43b645e849485908f17e2f82be2d7955b5a6905951156917c90cd08483d83bc2d"
            "88410812d440e4b250aa07656229328d28d53eb92a134f6212542706e0e4b526b2a148241e242d29b943"
            "127fe60e526e47c4fd19b84bf29e43b7f419af947127627c1ec616726ccb477c82883b0ef1aa8a2591b8"
            "dced4fc5764cd8f683f67dd92d3c3c8a84bd69c3f5307c835f0735f53d491d7035065f0cb067000745b0"
            "a102bf33744da1372b3d8638fb22b3fd11cc656c9e7f59eac8eb58ee30e45340b68c72d0922dfae30c79"
            "741eff63863dcaf9c48733e110cf846f98b8c7898ebb486c64893a2af10a240c3189a024e1c5382e4938"
            "42aae2119726c20b47842120e21523ea50c4466f639c1baddb08df6b04a9864306e2438128270ab17610"
            "9d9f71c6302c1246c429647438c624df8b3262f151170e7311be5c71c328da5b314628a455b1311535a7"
            "78e7afa1f3d673bc17fb56ea5e499e6945995e6ba741c1f4a5a6f58c7453914a944a5b00e9fd49fd9034"
            "c80780a2a851144588318610420c31862863ccd89c07200222208418c5d0071010da0352549c25dd8748"
            "303da44247a481e946d643ab4f3dbb598477e19b08843e16e4410a12490f32e4a4f0c224e53a13566123"
            "eb21c4dff22017d7e0e2601e7c3cd2e4bbbfddfce1417dfb74d1ce9d2b417c845e8312394633bfed6819"
            "ac66837dd99888c7a2b4c499a388dd9b84d2f07d7265c8368f2c4ad7610c8cec5a9581b2f860a2091dbb"
            "1455442341c174153374f29ecfac8090cf54d0eeaac90f6a268d25aee7dc71e61bb66f0dab2ad459a390"
            "da079462eacf8aa81c5b96fca074006cf464600e9de2b5b475adb16d2b66a0cfc552572344705304acb1"
            "769ebf951b682f8441c7da89a4b5106279b87c4e28f2a7f0a7eda5fe202d070664b0ac4c495bcec910d0"
            "e2a9fd62cf590d80d7f1db60f78ab032d349e4a1b2dde663c52951e969eb160bf35d15998e1146cf5934"
            "eec10e4455da80c18b1b28390b03f66630fa3ee2709f9f84317c8f4d2de16632ba2e017532ff4c551bf6"
            "350a98d0c4df5bc7a52ae1e44d2c184137866582b169255e849f035e06f2892868c1e8889855a2b9ab02"
        ),
    ),
    "long matches 19": (
        bytes(range(256)) * 600,
        (
            "28b52ffd00685c08000410000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e"
            "1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748"
            "494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172"
            "737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c"
            "9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6"
            "c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0"
            "f1f2f3f4f5f6f7f8f9fafbfcfdfeff010000fdfe03f99a02550000000100fdd700803d0201"
        ),
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_what_the_program_compressed(name: str) -> None:
    content, frame = FRAMES[name]
    assert inflate(bytes.fromhex(frame), 1 << 20) == content


def test_never_more_than_the_limit() -> None:
    content, frame = FRAMES["one byte many times 19"]
    with pytest.raises(BeyondLimitsError):
        inflate(bytes.fromhex(frame), len(content) - 1)


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_cut_anywhere(name: str) -> None:
    frame = bytes.fromhex(FRAMES[name][1])
    for length in range(0, len(frame), 7):
        with pytest.raises(DamagedError):
            inflate(frame[:length], 1 << 20)


def test_frames_with_wrong_bits(rng: random.Random) -> None:
    """Without a checksum some stay content; none is anything but content or a clear refusal."""
    refused = 0
    for content, text in FRAMES.values():
        for _ in range(60):
            frame = bytearray(bytes.fromhex(text))
            for _ in range(rng.choice((1, 1, 3))):
                frame[rng.randrange(4, len(frame))] ^= 1 << rng.randrange(8)
            try:
                assert len(inflate(bytes(frame), 1 << 18)) <= 1 << 18
            except ProblemError:
                refused += bool(content)
    assert refused > 50
