//! Names that make trouble, and secrets that must not leak.

use lockkit_core::{ErrorKind, LockKey, Query};

use super::{CaseResult, Ctx, LONG, assert_taken, cases, grant, request, seen, take};

cases! { "input":
    odd_names_are_distinct [NOTHING] "Names that differ in any byte are different locks (R11)."
    odd_names_are_shown_as_they_are [NOTHING] "Inspection gives names back unchanged (R11)."
    impossible_names_are_refused [NOTHING] "Names of 0 or over 512 bytes are invalid input (R11)."
    the_longest_name_works [NOTHING] "A name of 512 bytes is a lock, and so is one that differs in the last of them (R11)."
    tokens_are_not_printed [NOTHING] "No token appears in what is printed for debugging."
}

/// Pairs that careless stores fold into one, and characters that mean something somewhere.
const ODD: &[&str] = &[
    "a",
    "A",
    "a ",
    " a",
    "a\0",
    "a\n",
    "a\t",
    "ä",
    "a\u{308}",
    "Ä",
    "ß",
    "ss",
    "ſ",
    "K",
    "\u{212a}",
    "é",
    "e\u{301}",
    "🔒",
    "{a}",
    "{a",
    "a}",
    "{}",
    "{{a}}",
    "a{b}c",
    "a%7Bb%7Dc",
    "%",
    "%%",
    "%25",
    "a/b",
    "a//b",
    "/a",
    "a/",
    ".",
    "..",
    "../a",
    "a:b",
    "a:fence",
    "{a}:fence",
    "lockkit:a",
    "lockkit:esc:a",
    "*",
    "?",
    "[a]",
    "\\",
    "\"",
    "'",
    "''",
    "`",
    ";",
    "--",
    "' OR '1'='1",
    "a'; DROP TABLE resource_lock; --",
    "${a}",
    "$(a)",
    "]]",
    "return 1",
    "\u{feff}",
    "\u{200b}",
    "a\u{200b}",
    "_c_x-lock-0000000001",
    "lock-0000000001",
    "\u{10ffff}",
    "zookeeper",
];

async fn odd_names_are_distinct(ctx: Ctx) -> CaseResult {
    let (locker, other) = (ctx.locker().await?, ctx.locker().await?);
    let base = ctx.name();
    let mut held = Vec::new();
    for odd in ODD {
        let name = format!("{base}{odd}");
        held.push(take(&locker, &name, LONG).await.map_err(|e| format!("{odd:?}: {e}"))?);
    }
    for (odd, guard) in ODD.iter().zip(&held) {
        assert!(guard.is_held(), "{odd:?}");
        assert_taken(&other, &format!("{base}{odd}")).await?;
    }
    Ok(())
}

async fn odd_names_are_shown_as_they_are(ctx: Ctx) -> CaseResult {
    let (locker, base) = (ctx.locker().await?, ctx.name());
    let mut names: Vec<_> = ODD.iter().map(|odd| format!("{base}{odd}")).collect();
    let mut held = Vec::new();
    for name in &names {
        held.push(take(&locker, name, LONG).await?);
    }
    let states = locker.inspect(&Query::Prefix(base)).await?;
    names.sort();
    let shown: Vec<_> = states.iter().map(|state| state.key.as_str()).collect();
    assert_eq!(shown, names);
    Ok(())
}

async fn impossible_names_are_refused(ctx: Ctx) -> CaseResult {
    let locker = ctx.locker().await?;
    for name in [String::new(), "x".repeat(513), "x".repeat(1 << 20)] {
        let error = locker.lock(&name).try_acquire().await.expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert_eq!(error.to_string().lines().count(), 1);
        assert!(error.to_string().len() < 300, "the message repeats the whole name");
    }
    Ok(())
}

async fn the_longest_name_works(ctx: Ctx) -> CaseResult {
    let (locker, mut name) = (ctx.locker().await?, ctx.name());
    let longest = locker.info().capability.max_key_bytes.min(LockKey::MAX_BYTES);
    name.push_str(&"é".repeat((longest - name.len()) / 2));
    while name.len() < longest {
        name.push('x');
    }
    let mut twin = name.clone();
    twin.pop();
    twin.push('y');
    while twin.len() < longest {
        twin.push('y');
    }
    let _first = take(&locker, &name, LONG).await?;
    let _second = take(&locker, &twin, LONG).await?;
    Ok(())
}

async fn tokens_are_not_printed(ctx: Ctx) -> CaseResult {
    let (store, locker, name) = (ctx.store().await?, ctx.locker().await?, ctx.name());
    let guard = take(&locker, &name, LONG).await?;
    let secret = guard.token().reveal();
    let state = seen(&locker.lock(&name)).await?;
    let mut mine = request(&ctx.key()?, LONG)?;
    let hold = grant(&store, &mut mine).await?;
    let printed = format!("{guard:?} {state:?} {locker:?} {:?} {store:?}", locker.lock(&name));
    assert!(!printed.contains(&secret), "a token is printed: {printed}");
    assert!(!format!("{mine:?} {hold:?}").contains(&mine.claim.token.reveal()));
    Ok(())
}
