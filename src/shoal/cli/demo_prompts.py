"""What `shoal demo` asks. Original text, so that the demo needs no data."""

SHORT = "What is the capital of France? Answer in one sentence."

LONG = """Read this note and then answer the question at its end.

Fish that swim together do so in two ways. A shoal is any group of fish that stay near each other for company: they \
may be of several kinds, of several sizes, and each may look for food in its own direction. A school is a shoal that \
has fallen into step: every fish points the same way, keeps the same distance from its neighbours and turns when they \
turn. Most shoals become schools when they travel or when something frightens them, and loosen again when they feed.

No fish leads. Each watches only the few that swim closest, and keeps to three habits: do not bump into a neighbour, \
do not fall far behind, and point where the others point. A flash of silver on one flank is seen by the next fish \
within a few hundredths of a second, and it turns as well; so a change of direction runs through a school of a \
thousand fish like a wave, faster than any single fish can swim.

Company pays. A hunter finds it hard to follow one fish among many that look alike, and many eyes notice danger \
earlier than two. A fish in a group finds food sooner, because it sees when others have found some. Swimming in the \
wake of others may also save strength, although this has proved hard to measure in the sea. Company costs as well: the \
food that is found must be shared, the water in the middle of a large school holds less oxygen, and a large group is \
easier to see from far away. Herring, for this reason, draw together at dawn and drift apart at night, when hunters \
that rely on their eyes cannot see them.

People have borrowed the three habits. Programs that draw flocks and crowds in films use them, and small robots that \
must keep together without a leader use them too.

Question: in two sentences, what is the difference between a shoal and a school, and why do fish swim together?"""
