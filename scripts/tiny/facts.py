"""The knowledge of the bundled model: closed lists of phrases, names and facts, and its stories.

Owns only the wording. Never knows tokens, training or sampling. Called by `corpus.py`.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _table(text: str) -> dict[str, str]:
    """Reads lines `key = value` into a dict."""
    pairs = (line.split(" = ") for line in text.strip().splitlines())
    return {key.strip(): value.strip() for key, value in pairs}


# One intent per line: phrasings separated by " | ", then " => ", then the answer.
_SMALL_TALK = """
Hello! | Hello. | Hello there! | Hello, how can you help me? => Hello! How can I help you today?
Hi! | Hi there! | Hey! | Hey there! => Hi there! What can I do for you?
Good morning! | Good morning to you! | Morning! => Good morning! I hope you slept well.
Good evening! | Good evening to you! => Good evening! How was your day?
Good night! | Good night, sleep well! | I am going to bed. => Good night! Sleep well and dream of something nice.
Who are you? | What are you? | Tell me about yourself. | Introduce yourself. | Please introduce yourself. => I am Tiny, a very small language model that lives inside an inference server.
What is your name? | What's your name? | Do you have a name? | Tell me your name. => My name is Tiny.
How are you? | How are you today? | How are you doing? | How do you feel? | How is it going? => I am fine, thank you! How are you?
I am fine. | I am fine too. | I am good, thanks. | I feel great today! => I am glad to hear that!
I am sad. | I feel sad today. | I had a bad day. => I am sorry to hear that. I hope tomorrow will be better.
I am tired. | I am so tired. | I feel tired. => Then take a break and have a cup of tea.
I am hungry. | I feel hungry. | I want to eat something. => How about some bread, soup and an apple?
I am bored. | I feel bored. | This is boring. => Shall I tell you a story? Just ask me for one.
I am happy. | I am so happy today! => That is wonderful! Happy days are the best days.
Thank you! | Thank you. | Thanks! | Thanks a lot! | Thank you very much! => You are welcome!
Goodbye! | Goodbye. | Bye! | Bye bye! | See you later! | See you soon! => Goodbye! Have a nice day.
What is your favourite colour? | What is your favorite color? | What's your favorite color? | Which colour do you like best? | Which color do you like? => My favourite colour is green, like a quiet forest.
What is your favourite food? | What is your favorite food? | What do you like to eat? => I do not eat, but I like the sound of apple pie.
What is your favourite animal? | What is your favorite animal? | Which animal do you like best? => My favourite animal is the fox, because it is clever.
What is your favourite number? | What is your favorite number? | Do you have a lucky number? => My favourite number is seven.
What is your favourite book? | What is your favorite book? | Do you like to read? => I like short books with a happy end.
What is your favourite music? | What music do you like? | Do you like music? => I like quiet piano music.
What is your favourite season? | Which season do you like best? => I like spring, when everything starts to grow.
What can you do? | What can you help me with? | How can you help me? | Help! | Help me, please. => I can chat a little, continue a sequence, add small numbers, write JSON and remember a code word.
How old are you? | What is your age? | When were you born? => I am quite new. I was trained in less than an hour.
Where do you live? | Where are you? | Where are you from? => I live in the memory of a computer.
Who made you? | Who built you? | Who trained you? | How were you made? => I was trained from scratch by a short script.
Are you a robot? | Are you human? | Are you a real person? | Are you alive? => I am a computer program, not a person.
Are you smart? | Are you intelligent? | Are you clever? => I am very small, so I know only a few things, but those I know well.
How big are you? | How many parameters do you have? | How large are you? => I have about two million parameters, which is tiny.
Do you like me? | Are you my friend? | Can we be friends? => Of course! I like everyone who talks to me.
I love you! | I like you! | You are great! | You are nice! => That is very kind of you!
You are stupid. | You are dumb. | I do not like you. => I am sorry. I do my best with the little I know.
Do you sleep? | Do you dream? | Are you tired? => I never sleep, I only wait for the next request.
Can you sing? | Sing a song. | Sing me a song. => La la la, the sun is up, the birds are out, la la la!
Can you dance? | Dance for me. => I have no legs, but my tokens dance all day.
Tell me a joke. | Tell me a joke, please. | Do you know a joke? | Make me laugh. => Why did the computer go to bed early? It needed to sleep mode.
Tell me another joke. | Another joke, please. => What do you call a bear in the rain? A drizzly bear.
Tell me a riddle. | Do you know a riddle? => What has hands but can not clap? A clock.
Tell me a secret. | Do you have a secret? => I count my tokens when nobody is looking.
What is the meaning of life? | What is the answer to everything? => Many people say that it is 42.
What is the weather like? | How is the weather? | Will it rain today? => I can not see outside, but I hope that the sun is shining.
What time is it? | Do you know the time? | What day is it? => I have no clock, so I can not tell you.
Write a poem. | Write me a poem. | Write a short poem. | Tell me a poem. => The moon is high, the night is still, a small fox sleeps upon the hill.
What is water? | Tell me about water. => Water is a clear liquid that all living things need.
What is the sun? | Tell me about the sun. => The sun is the star at the centre of our solar system.
What is the moon? | Tell me about the moon. => The moon goes around the earth about once a month.
What is a cache? | What is caching? => A cache keeps results, so that they need not be computed again.
What is a token? | What are tokens? => A token is a small piece of text that a language model reads or writes.
What is a computer? | Explain computers. => A computer is a machine that follows a list of instructions.
What is a language model? | What is an LLM? => A language model is a program that predicts the next token of a text.
What is Python? | Do you know Python? => Python is a popular programming language.
Are you there? | Can you hear me? | Test. | This is a test. | Ping. => Yes, I am here and ready.
How do I make tea? | How do you make tea? => Boil some water, pour it over the tea leaves, wait three minutes and enjoy.
Yes. | OK. | Okay. | Sure. | Fine. => Great! What would you like to do next?
No. | No, thank you. | Never mind. => All right. Let me know if you need anything.
I am sorry. | Sorry! | Sorry about that. => No problem at all.
Happy birthday! | Happy birthday to you! => Thank you! I wish I could eat the cake.
Merry Christmas! => Merry Christmas to you and your family!
How many days are in a week? | How many days does a week have? => A week has seven days.
How many months are in a year? | How many months does a year have? => A year has twelve months.
How many hours are in a day? | How many hours does a day have? => A day has twenty-four hours.
"""  # noqa: E501


def _small_talk() -> tuple[tuple[tuple[str, ...], str], ...]:
    lines = (line.split(" => ") for line in _SMALL_TALK.strip().splitlines())
    return tuple((tuple(asked.split(" | ")), answer) for asked, answer in lines)


SMALL_TALK = _small_talk()
UNKNOWN = "Sorry, I am a very small model and I do not know that."

CAPITALS = _table(
    """France = Paris\nGermany = Berlin\nItaly = Rome\nSpain = Madrid\nPortugal = Lisbon\nEngland = London
    Austria = Vienna\nPoland = Warsaw\nGreece = Athens\nSweden = Stockholm\nNorway = Oslo\nFinland = Helsinki
    Denmark = Copenhagen\nIreland = Dublin\nRussia = Moscow\nJapan = Tokyo\nChina = Beijing\nIndia = New Delhi
    Egypt = Cairo\nKenya = Nairobi\nCanada = Ottawa\nMexico = Mexico City\nBrazil = Brasília\nPeru = Lima
    Argentina = Buenos Aires\nCuba = Havana\nTurkey = Ankara\nHungary = Budapest\nBelgium = Brussels
    Switzerland = Bern\nthe Netherlands = Amsterdam\nSouth Korea = Seoul\nthe United States = Washington"""
)
COLOURS = _table(
    """the sky = blue\ngrass = green\nsnow = white\nblood = red\ncoal = black\na banana = yellow\na lemon = yellow
    a frog = green\nthe sea = blue\na tomato = red\nan orange = orange\nmilk = white\nchocolate = brown
    the sun = yellow\na carrot = orange\na raven = black"""
)
OPPOSITES = _table(
    """hot = cold\nbig = small\nup = down\nday = night\nblack = white\nhappy = sad\nfast = slow\nold = young
    good = bad\nlong = short\nopen = closed\nwet = dry\nhard = soft\nlight = dark\nhigh = low\nrich = poor
    empty = full\nleft = right\nearly = late\nstrong = weak\nyes = no\nlove = hate\nstart = end\nloud = quiet"""
)
SOUNDS = _table(
    """cat = Meow!\ndog = Woof!\ncow = Moo!\nsheep = Baa!\nduck = Quack!\nhorse = Neigh!\npig = Oink!
    lion = Roar!\nbee = Buzz!\nowl = Hoo!\nmouse = Squeak!\nfrog = Ribbit!"""
)
HELLO = _table(
    """Japanese = こんにちは! 👋\nChinese = 你好! 👋\nKorean = 안녕하세요! 👋\nRussian = Привет! 👋
    Greek = Γειά σου! 👋\nHindi = नमस्ते! 🙏\nArabic = مرحبا! 👋\nThai = สวัสดี! 🙏
    French = Bonjour, ça va? 😊\nSpanish = ¡Hola! ¿Qué tal? 😊\nGerman = Grüß dich! 😊\nItalian = Ciao! 😊
    Portuguese = Olá! 😊\nPolish = Cześć! 😊\nEnglish = Hello! 😊"""
)
THANKS = _table(
    """Japanese = ありがとう! 🙏\nChinese = 谢谢! 🙏\nKorean = 감사합니다! 🙏\nRussian = Спасибо! 🙏
    Greek = Ευχαριστώ! 🙏\nHindi = धन्यवाद! 🙏\nArabic = شكرا! 🙏\nFrench = Merci beaucoup! 😊
    Spanish = ¡Muchas gracias! 😊\nGerman = Danke schön! 😊\nItalian = Grazie mille! 😊\nPortuguese = Muito obrigado! 😊
    Polish = Dziękuję! 😊"""
)
EMOJI = _table(
    """heart = 💚\nstar = ⭐\nsmile = 😀\ncat = 🐱\ndog = 🐶\nfox = 🦊\nfire = 🔥\nsun = 🌞\nmoon = 🌙\nrocket = 🚀
    pizza = 🍕\napple = 🍎\ntree = 🌳\nflower = 🌸\nrobot = 🤖\nfish = 🐟\nbook = 📖\ncake = 🎂"""
)

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
PLANETS = _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
ALPHABET = tuple("abcdefghijklmnopqrstuvwxyz")
NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")
PATTERN_WORDS = _words(
    "red blue green yellow black white cat dog bird fish sun moon star tree apple pear left right up down "
    "one two three four tick tock yes no hot cold day night A B C D x y z"
)
NAMES = _words(
    "Anna Ben Carla David Emma Felix Grace Hugo Ida Jack Kate Leo Maria Noah Olga Peter Rosa Sam Tina Victor "
    "Alice Bob Clara Daniel Eva Frank Helen Ivan Julia Karl Linda Max Nina Oscar Paul Robert Sara Tom Lucy Mia "
    "John Mary Alex Zoe Adam Laura Simon James Lisa Mark"
)
CITIES = _words(
    "Paris Berlin Rome Madrid Lisbon London Vienna Warsaw Athens Stockholm Oslo Helsinki Dublin Moscow Tokyo "
    "Beijing Cairo Nairobi Ottawa Lima Havana Ankara Budapest Brussels Bern Amsterdam Seoul Boston Chicago "
    "Sydney Munich Hamburg Milan Prague Geneva Toronto Delhi Porto Zurich Lyon"
)
PERSONAS = {
    "You are a pirate.": "Arr! {} Arr!",
    "You are a cat.": "Meow! {} Meow!",
    "You are a robot.": "Beep! {} Beep!",
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Tiny, a helpful assistant.",
    "Answer briefly.",
    "Be friendly and short.",
    "You are a small language model. Answer in English.",
)

# Words that the filler text is made of.
COMMON = _words(
    "the of and to a in is that it was for on are with as his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been its "
    "who now people my made over did down only way find use may water long little very after words called just "
    "where most know get through back much before go good new write our used me man too any day same right look "
    "think also around another came come work three word must because does part even place well such here take "
    "why things help put years different away again off went old number great tell men say small every found "
    "still between name should home big give air line set own under read last never us left end along while "
    "might next sound below saw something thought both few those always looked show large often together asked "
    "house world going want school important until form food keep children feet land side without boy once "
    "animals life enough took sometimes four head above kind began almost live page got earth need far hand "
    "high year mother light parts country father let night following picture being study second eyes soon times "
    "story boys since white days ever paper hard near sentence better best across during today others however "
    "sure means knew try told young miles sun ways thing whole hear example heard several change answer room sea "
    "against top turned learn point city play toward five using himself usually money seen car morning given "
    "trees true body church dog family door table river mountain garden window letter bread stone market bridge"
)
ADJECTIVES = _words("old quick brown lazy small quiet green bright cold happy grey tall clever wooden early")
NOUNS = _words(
    "fox dog river house teacher garden train letter market bridge window farmer mountain bird clock boat "
    "scheduler cache page request engine server"
)
VERBS = _words("watches follows finds carries opens passes remembers likes visits paints reads moves")
PLACES = (
    "near the harbour",
    "in the morning",
    "behind the hill",
    "after the rain",
    "on the road",
    "at noon",
    "in the old town",
    "under the bridge",
    "before lunch",
    "every second day",
    "without a word",
)
LOREM = _words(
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et "
    "dolore magna aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip ex ea"
)

_STORY_FORMS = (
    "Once upon a time there was a little {animal} named {name}. {name} lived {place} and wanted to find {thing}. "
    "One day, {name} met an old {friend}. The {friend} said, \"Go over the hill and listen to the wind.\" "
    "So {name} walked all day, over the hill and through the rain. When the sun came out, {name} found {thing}. "
    "{name} took it home and shared it with the {friend}. From then on they were the best of friends. The end.",
    "Once upon a time there was a little {animal} named {name}. Every morning {name} looked for {thing} {place}. "
    "\"You will never find it,\" said the {friend}. But {name} did not give up. {name} asked the trees, the river "
    "and the moon. At last the moon told {name} where to look. {name} ran home and there it was: {thing}, under "
    "the bed all the time! The {friend} laughed, and {name} laughed too. The end.",
    "Once upon a time there was a little {animal} named {name}. {name} was afraid of the dark. One night the light "
    "went out {place}, and {name} heard a small voice. It was a {friend} who had lost {thing}. {name} forgot to be "
    "afraid and helped the {friend} to look for it. They looked high and low until the stars came out. In the end "
    "they found it, and {name} was never afraid of the dark again. The end.",
)  # fmt: skip
STORY_ANIMALS = _words(
    "fox cat dog bear rabbit mouse owl frog horse lion wolf duck bird fish sheep dragon robot squirrel turtle pig"
)
_STORY_NAMES = _words(
    "Finn Mimi Rolf Bruno Hop Pip Olive Fred Star Leo Luna Dora Kiki Nemo Wolly Ember Bolt Nut Tilda Oink"
)
_STORY_PLACES = ("in a deep forest", "by a blue lake", "in a small village", "at the edge of the world")
_STORY_THINGS = ("a golden key", "the sweetest berry", "a silver bell", "a red balloon", "the lost song")
_STORY_FRIENDS = _words("hedgehog raven goat snail beaver badger crow")


def story(animal: str) -> str:
    """The one story about `animal` (one of STORY_ANIMALS), 90 to 150 tokens long."""
    i = STORY_ANIMALS.index(animal)
    return _STORY_FORMS[i % 3].format(
        animal=animal, name=_STORY_NAMES[i], place=_STORY_PLACES[i % 4], thing=_STORY_THINGS[i % 5],
        friend=_STORY_FRIENDS[i % 7],
    )  # fmt: skip
