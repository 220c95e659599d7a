/*
 * A model of semaphores, which Spin checks in every state. `test_semaphore_model.py` runs it; by hand, in a folder of
 * its own:
 *
 *     spin -DPROMPT -a semaphore.pml && gcc -O2 -DSAFETY -DNOREDUCE -DCOLLAPSE -o pan pan.c && ./pan -m6000000 -w25
 *
 * What is modelled. A script on the server is one step. The set of members, with their ends, and the queue are as in
 * the keys; time is counted down, so it passes without limit. A client takes the steps that a caller takes: it
 * acquires, waits or only tries, renews, releases, is cancelled, or its time limit ends. Nothing bounds how often a
 * thing happens:
 * - a connection breaks: its replies and messages are lost, and the client sends its request again (so it is executed
 *   twice);
 * - a request is late: it is executed at any later time, also after its connection broke, or never (one at a time);
 * - the message of a grant is lost alone; a process is killed, and starts again; the operator resizes, 2 to 1 to 2.
 *
 * A token is used again only when no trace of it is left, as a new one would be. Each client stands for a process: the
 * health check of its poller, which is made for all its waiters. One step of time is the interval of these checks.
 *
 * Two forms. PROMPT: 3 processes; all that is under way, except requests of broken connections, arrives before time
 * passes, and each waiter has then made a health check. Else 2 processes; messages take any time.
 *
 * The rules, each an assertion:
 * 1. `admit`: members with an end in the future are at most as many as the limit when a permit is granted.
 * 2. `believe`: a client that believes to hold is a member with an end in the future, for as long at least. By 1, no
 *    more clients believe so than the highest limit at their grants.
 * 3. `admit`: nobody gets a permit while another has waited, and listened, for longer; nor by a try.
 * 4. `rest` (PROMPT): when time passes, no process waits while there is room; `acquire`: a try is refused only
 *    without room.
 * 5. `rest`: the permit of a process that was killed or gave up is free after one ttl; after all have ended, so are
 *    all.
 * 6. A request that is executed twice or late breaks none of these.
 *
 * Each of these definitions plants a fault, which the checker finds:
 * CALLERS_TTL        a purge goes by the caller's ttl
 * CLIENT_CLOCK       a purge goes by the caller's clock; that of one is a step ahead
 * COUNTER            the permits are counted beside the set
 * SHORTENED_KEY_TTL  each acquire sets the ttl of the key to its own
 * NO_LISTENER        a permit is granted without a look whether the waiter listens
 * NO_HAND_OVER       a release leaves the queue alone
 * OFF_BY_ONE         one permit more than the limit
 * END_MOVES_BACK     an acquire or a renewal sets the end anew even if that is sooner: a late acquire undoes a renewal
 * ENTRY_STAYS        a release leaves the waiter's entry in the queue, which a health check has made after the grant
 * SHARED_SINCE       the reply "queued" to one waiter counts as the last moment without a permit of other waiters, too
 */

#define N 3                             /* processes, each with one caller */
#define LIMIT 2                         /* permits, until the operator resizes */
#define LONG 2                          /* the longest ttl, in steps of time */
#define TTL(i) (i == 1 -> 1 : LONG)     /* of an acquire; a renewal asks for LONG */

/* What a client does. */
#define IDLE 0
#define ASKING 1        /* its first acquire is under way */
#define TRYING 2        /* the same, without waiting */
#define WAITING 3
#define HOLDING 4
#define RELEASING 5
#define LEAVING 6       /* its time limit has ended */
#define DEAD 7

/* Requests. */
#define ACQUIRE 1
#define TRY 2
#define RENEW 3
#define RELEASE 4
#define KEEP 5          /* leave the queue, and keep a permit granted meanwhile */
#define PASS_ON 6       /* leave the queue, and pass it on: the cleanup */

/* Replies, and the message that a permit was granted. */
#define GRANT 1
#define HELD 2
#define QUEUED 3
#define NO 4

/* The server. */
byte member[N];         /* 0: not in the set; 1: its end has passed; else the steps that are left, plus 1 */
byte key_ttl;           /* the steps until the set ends as a whole */
byte place[N];          /* in the queue, from 1 */
bit listens[N];         /* whether the channel in the waiter's entry has a listener */
byte limit = LIMIT;
#ifdef COUNTER
byte counter;
#endif

/* The clients. */
byte state[N];
byte open[N];           /* the request whose reply is to come */
byte age[N];            /* the steps since that was sent */
byte t[N];              /* HOLDING: the steps for which it believes to hold; ASKING, WAITING, LEAVING: those since it
                           certainly had no permit; IDLE, DEAD: those since it may last have caused a permit */
byte inbox[N];          /* replies and messages under way, digits to the base 5, the next one lowest */
bit checked[N];         /* has made its health check in this step of time */

/* The one request that is late. */
byte late;
byte late_of;
bit late_alive;         /* whether its connection is */
byte late_next;         /* the request that follows it on its connection */

byte ahead[N];          /* for the rule of order: the set of those that were there before, and have listened since */

hidden byte size, k, first, answer;     /* of no meaning between two steps */

#define is_live(i) (member[i] > 1)
#define LIVE (is_live(0) + is_live(1) + is_live(2))
#define QUEUE (place[0] + place[1] + place[2])
#define is_late(i) (late && late_of == (i))
#define is_slow(i) (late && late_of == (i) && late_alive)
#define is_traceless(i) (member[i] == 0 && place[i] == 0 && !is_late(i))
#define each(what) (what(0) && what(1) && what(2))

inline forget(i) {
    ahead[0] = ahead[0] & ~(1 << i); ahead[1] = ahead[1] & ~(1 << i); ahead[2] = ahead[2] & ~(1 << i)
}

inline mute(i) { listens[i] = 0; forget(i) }

inline dequeue(i) {
    if
    :: place[i] ->
        for (k : 0 .. N-1) { if :: place[k] > place[i] -> place[k]-- :: else fi }
        place[i] = 0
    :: else
    fi;
    ahead[i] = 0; mute(i)
}

inline prolong(i, ttl) {
#ifdef END_MOVES_BACK
    member[i] = ttl + 1;
#else
    if :: member[i] < ttl + 1 -> member[i] = ttl + 1 :: else fi;
#endif
#ifdef SHORTENED_KEY_TTL
    key_ttl = ttl
#else
    if :: key_ttl < ttl -> key_ttl = ttl :: else fi
#endif
}

inline remove(i) {
#ifdef COUNTER
    if :: member[i] -> counter-- :: else fi;
#endif
    member[i] = 0;
    if :: member[0] + member[1] + member[2] == 0 -> key_ttl = 0 :: else fi
}

inline admit(i) {
#ifdef COUNTER
    if :: member[i] == 0 -> counter++ :: else fi;
#endif
    prolong(i, TTL(i));
    assert(LIVE <= limit);
    assert(ahead[i] == 0);
    dequeue(i)
}

inline count() {
#ifdef COUNTER
    size = counter
#else
    size = (member[0] > 0) + (member[1] > 0) + (member[2] > 0)
#endif
}

#ifdef OFF_BY_ONE
#define is_full (size > limit)
#else
#define is_full (size >= limit)
#endif

inline purge(caller) {
    for (k : 0 .. N-1) {
        if
        :: member[k] == 1 -> remove(k)
#ifdef CALLERS_TTL
        :: caller < N && member[k] > 1 && member[k] - 1 + TTL(caller) <= TTL(k) -> remove(k)
#endif
#ifdef CLIENT_CLOCK
        :: caller == 2 && member[k] == 2 -> remove(k)
#endif
        :: else
        fi
    }
}

inline tell(i, what) {
    if
    :: state[i] == IDLE || state[i] == DEAD
    :: else ->
        assert(inbox[i] < 25);
        inbox[i] = inbox[i] + what * (inbox[i] == 0 -> 1 : (inbox[i] < 5 -> 5 : 25))
    fi
}

inline hand_over(caller) {
    count();
    if :: is_full -> purge(caller); count() :: else fi;
    do
    :: !is_full && QUEUE ->
        first = (place[0] == 1 -> 0 : (place[1] == 1 -> 1 : 2));
        if
        :: first == caller -> admit(first)
#ifdef NO_LISTENER
        :: first != caller -> admit(first); tell(first, GRANT)
#else
        :: first != caller && listens[first] -> admit(first); tell(first, GRANT)
        :: first != caller && !listens[first] -> dequeue(first)
#endif
        fi;
        count()
    :: else -> break
    od
}

inline arrive(i) {
    ahead[i] = 0;
    for (k : 0 .. N-1) { if :: k != i && listens[k] -> ahead[i] = ahead[i] | (1 << k) :: else fi }
}

inline acquire(i, joins, alive) {
    if :: place[i] == 0 -> arrive(i) :: else fi;
    if
    :: is_live(i) -> prolong(i, TTL(i)); dequeue(i)
    :: else ->
        hand_over(i);
        if :: !is_live(i) && !is_full -> admit(i) :: else fi
    fi;
    if
    :: is_live(i) -> answer = HELD
    :: !is_live(i) && joins ->
        answer = QUEUED;
        if :: place[i] == 0 -> place[i] = 1 + (place[0] > 0) + (place[1] > 0) + (place[2] > 0) :: else fi;
        listens[i] = alive;
        if :: !alive -> forget(i) :: else fi
    :: else ->
        assert(LIVE >= limit);
        ahead[i] = 0
    fi
}

inline believe() {
    assert(state[0] != HOLDING || t[0] == 0 || t[0] < member[0]);
    assert(state[1] != HOLDING || t[1] == 0 || t[1] < member[1]);
    assert(state[2] != HOLDING || t[2] == 0 || t[2] < member[2])
}

/* A script on the server. */
inline execute(i, kind, alive) {
    answer = NO;
    if
    :: kind == ACQUIRE || kind == TRY -> acquire(i, kind == ACQUIRE, alive)
    :: kind == RENEW -> if :: is_live(i) -> prolong(i, LONG); answer = HELD :: else fi
    :: kind == KEEP -> dequeue(i); if :: is_live(i) -> answer = HELD :: else fi
    :: kind == RELEASE || kind == PASS_ON ->
#ifdef ENTRY_STAYS
        if :: kind == PASS_ON -> dequeue(i) :: else fi;
#else
        dequeue(i);
#endif
        if
        :: member[i] ->
            remove(i);
#ifndef NO_HAND_OVER
            hand_over(i)
#endif
        :: else
        fi
    fi;
    believe()
}

/* A request of a client: it is executed, and its reply is under way; or it is late. */
inline send(i, kind) {
    if
    :: d_step { open[i] = kind; age[i] = 0; execute(i, kind, 1); checked[i] = (kind == ACQUIRE); tell(i, answer) }
    :: d_step { late == 0 -> open[i] = kind; age[i] = 0; late = kind; late_of = i; late_alive = 1 }
    fi
}

inline end(i, as) { state[i] = as; t[i] = 0; inbox[i] = 0; open[i] = 0; age[i] = 0; checked[i] = 0 }

inline hold(i, ttl, since) { state[i] = HOLDING; checked[i] = 0; t[i] = (since < ttl -> ttl - since : 0) }

/* Send a request that follows those before on the same connection, and do not wait for its reply. */
inline post(i, kind) {
    end(i, IDLE);
    if :: is_slow(i) -> late_next = kind :: else -> execute(i, kind, 1) fi
}

inline receive(i) {
    answer = inbox[i] % 5; inbox[i] = inbox[i] / 5;
    if
    :: answer == GRANT ->
        if :: (state[i] == ASKING || state[i] == WAITING) && t[i] < TTL(i) -> hold(i, TTL(i), t[i]) :: else fi
    :: answer == HELD && state[i] == HOLDING ->
        if
        :: t[i] && open[i] == RENEW && t[i] + age[i] < LONG -> t[i] = LONG - age[i]
        :: t[i] && open[i] == ACQUIRE && t[i] + age[i] < TTL(i) -> t[i] = TTL(i) - age[i]
        :: else
        fi
    :: answer == HELD && state[i] == LEAVING -> hold(i, TTL(i), t[i])
    :: answer == HELD && state[i] < HOLDING -> hold(i, TTL(i), age[i])
    :: answer == QUEUED && state[i] < HOLDING ->
        state[i] = WAITING; t[i] = age[i];
#ifdef SHARED_SINCE
        for (k : 0 .. N-1) { if :: state[k] == WAITING && t[k] > age[i] -> t[k] = age[i] :: else fi }
#endif
    :: answer == NO && state[i] == HOLDING -> post(i, PASS_ON); answer = NO
    :: answer == NO && state[i] != HOLDING -> end(i, IDLE)
    :: else
    fi;
    if :: answer != GRANT -> open[i] = 0; age[i] = 0 :: else fi;
    believe()
}

#ifdef PROMPT
#define MANY 0
#define CALLERS 3
#else
#define MANY 2
#define CALLERS 2
#endif
#define are_few ((inbox[0] > 0) + (inbox[1] > 0) + (inbox[2] > 0) <= MANY)

active [CALLERS] proctype client() provided (inbox[_pid] || are_few) {
    byte i = _pid;
    do
    :: atomic { state[i] == IDLE && is_traceless(i) -> state[i] = ASKING; t[i] = 0; send(i, ACQUIRE) }
    :: atomic { state[i] == IDLE && is_traceless(i) -> state[i] = TRYING; t[i] = 0; send(i, TRY) }
    :: d_step { inbox[i] -> receive(i) }
    /* After a break, it sends again; a waiter makes its health check. */
    :: atomic { (state[i] == ASKING || state[i] == WAITING) && !open[i] -> send(i, ACQUIRE) }
    :: atomic { state[i] == TRYING && !open[i] -> send(i, TRY) }
    :: atomic { state[i] == RELEASING && !open[i] -> send(i, RELEASE) }
    :: atomic { state[i] == LEAVING && !open[i] -> send(i, KEEP) }
    :: atomic { state[i] == HOLDING && t[i] && !open[i] -> send(i, RENEW) }
    :: atomic { state[i] == HOLDING && !is_slow(i) -> end(i, RELEASING); send(i, RELEASE) }
    :: d_step { state[i] == HOLDING && is_slow(i) -> post(i, RELEASE) }
    /* It is cancelled, or its time limit ends. */
    :: d_step { state[i] == ASKING || state[i] == TRYING || state[i] == WAITING -> post(i, PASS_ON) }
    :: atomic { (state[i] == ASKING || state[i] == WAITING) && !is_slow(i) ->
            state[i] = LEAVING; inbox[i] = 0; checked[i] = 0; send(i, KEEP)
        }
    /* Its connection broke, and it gives up. */
    :: d_step { state[i] != IDLE && state[i] != HOLDING && state[i] != DEAD && !open[i] && !listens[i] -> end(i, IDLE) }
    /* Faults: its connection breaks, a message is lost, it is killed; and it starts again. */
    :: d_step {
            state[i] != DEAD && (open[i] || listens[i] || is_slow(i)) ->
            inbox[i] = 0; open[i] = 0; age[i] = 0; checked[i] = 0; mute(i);
            if :: is_slow(i) -> late_alive = 0 :: else fi
        }
    :: d_step { inbox[i] % 5 == GRANT -> inbox[i] = inbox[i] / 5; checked[i] = 0 }
    :: d_step {
            state[i] != DEAD && state[i] != IDLE ->
            end(i, DEAD); mute(i);
            if :: is_slow(i) -> late_alive = 0 :: else fi
        }
    :: d_step { state[i] == DEAD && is_traceless(i) -> end(i, IDLE) }
    od
}

#ifdef PROMPT
#define is_done(i) (!open[i] && !inbox[i] && \
    (state[i] == IDLE || state[i] == DEAD || state[i] == HOLDING || state[i] == WAITING && checked[i]))
#define may_tick (each(is_done) && !(late && late_alive))
#else
#define may_tick true
#endif
#define is_waiting(i) (state[i] == WAITING)
#define is_over(i) ((state[i] == IDLE || state[i] == DEAD) && t[i] == LONG && !is_late(i))

inline pass(i) {
    if :: member[i] > 1 -> member[i]-- :: else fi;
    if :: key_ttl == 0 -> member[i] = 0 :: else fi;
    if :: open[i] && age[i] < LONG -> age[i]++ :: else fi;
    if
    :: state[i] == HOLDING && t[i] -> t[i]--
    :: state[i] != HOLDING && state[i] != RELEASING && t[i] < LONG -> t[i]++
    :: else
    fi;
    if
    :: (state[i] == IDLE || state[i] == DEAD) && is_traceless(i) -> t[i] = LONG
    :: (state[i] == IDLE || state[i] == DEAD) && is_late(i) -> t[i] = 0
    :: else
    fi;
    checked[i] = 0
}

active proctype rest() provided (are_few) {
    do
    :: d_step {
            may_tick ->
#ifdef PROMPT
            assert(LIVE >= limit || !(is_waiting(0) || is_waiting(1) || is_waiting(2)));
#endif
            if :: key_ttl -> key_ttl-- :: else fi;
            pass(0); pass(1); pass(2);
            believe();
            assert(!is_over(0) || !is_live(0)); assert(!is_over(1) || !is_live(1)); assert(!is_over(2) || !is_live(2));
            count();
            assert(!each(is_over) || key_ttl || size == 0)
        }
    :: d_step { limit == LIMIT -> limit = 1; hand_over(N); believe() }
    :: d_step { limit == 1 -> limit = LIMIT; hand_over(N); believe() }
    :: d_step {
            late ->
            execute(late_of, late, late_alive);
            if
            :: late_alive && late == open[late_of] -> tell(late_of, answer); checked[late_of] = (late == ACQUIRE)
            :: else -> checked[late_of] = 0
            fi;
            late = late_next; late_next = 0;
            if :: late == 0 -> late_of = 0; late_alive = 0 :: else fi
        }
    :: d_step { late && !late_alive -> late = 0; late_of = 0; late_next = 0 }
    /* The queue ends with its ttl, when no waiter refreshes it. */
    :: d_step { QUEUE && !listens[0] && !listens[1] && !listens[2] -> dequeue(0); dequeue(1); dequeue(2) }
    od
}
