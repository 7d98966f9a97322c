//! What must hold for every name, value and URL, tried with odd ones. `PROPTEST_CASES` says how many.

use lockkit_core::{ErrorKind, Fence, HolderInfo, LockKey, Mode, Token};
use proptest::prelude::*;

use crate::{
    RedisConfig,
    wire::{
        name::{Names, counter},
        value::{self, Stored, StoredLease},
    },
};

/// Text of pieces that could confuse the spelling, and of anything else.
fn odd_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => proptest::sample::select(vec![
            "{", "}", "%", "7B", "%7B", "%25", ":", ":fence", "lockkit:", "lockkit:esc:", "a", "A", " ", "*", "[", "\\", "\n",
        ]).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(piece, 1..8).prop_map(|pieces| pieces.concat())
}

fn names() -> impl Strategy<Value = Names> {
    proptest::sample::select(vec!["", "lockkit:", "%", "a%7B", "lockkit:esc:"])
        .prop_map(|prefix| Names::new(prefix).expect("no braces"))
}

fn key(text: &str) -> LockKey {
    LockKey::new(text).expect("not empty, and short")
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn names_come_back_and_stay_apart(names in names(), a in odd_text(), b in odd_text()) {
        let (a, b) = (key(&a), key(&b));
        let [lock_a, lock_b] = [&a, &b].map(|name| names.lock(name));
        prop_assert_eq!(names.name(lock_a.as_bytes()), Some(a.clone()));
        prop_assert_eq!(names.name(counter(&lock_a).as_bytes()), None, "a counter is no lock");
        prop_assert_ne!(&lock_a, &counter(&lock_b));
        if a != b {
            prop_assert_ne!(counter(&lock_a), counter(&lock_b));
            prop_assert_ne!(lock_a, lock_b);
        }
    }

    #[test]
    fn a_key_of_others_is_no_name_of_ours(names in names(), found in odd_text()) {
        if let Some(name) = names.name(found.as_bytes()) {
            prop_assert_eq!(names.lock(&name), found);
        }
    }

    #[test]
    fn the_longest_name_has_a_key(names in names(), c in any::<char>()) {
        let longest = key(&c.to_string().repeat(LockKey::MAX_BYTES / c.len_utf8()));
        let lock = names.lock(&longest);
        prop_assert!(lock.len() <= 3 * LockKey::MAX_BYTES + 64);
        prop_assert_eq!(names.name(lock.as_bytes()), Some(longest));
    }

    #[test]
    fn a_value_survives_its_text(
        token in any::<u128>(), depth: u32, fence in 0..u64::pow(10, 19) - 1, span: u32, mark in "(@[0-9a-f]{8})?", holder in odd_text(),
    ) {
        let token: Token = format!("{token:032x}").parse().expect("32 digits");
        let holder = HolderInfo::new(&holder);
        let mut text = String::new();
        value::push_head(&mut text, &token, depth);
        text.push_str(&fence.to_string());
        value::push_tail(&mut text, span, &mark, &holder);
        let fence = Fence::new(fence);
        prop_assert_eq!(value::numbers(text.as_bytes()), Some((fence, span, depth)));
        prop_assert_eq!(Stored::parse(text.as_bytes()), Stored::Lease(Mode::Exclusive, StoredLease { token, depth, fence, span, holder }));
    }

    #[test]
    fn any_value_can_be_read(head in "[0-9a-f]{0,33}", tail in odd_text(), bytes: Vec<u8>) {
        for value in [bytes, format!("{head}{tail}").into_bytes(), format!("{head}:1:2:3:{tail}").into_bytes()] {
            let holder = Stored::parse(&value).into_holder();
            prop_assert!(!holder.as_str().contains(char::is_control));
            let _ = value::numbers(&value);
        }
    }

    #[test]
    fn any_url_is_read_or_refused_in_one_line(tls: bool, user in "[a-z]{0,2}", rest in odd_text(), option in "[?&](prefix|timeout|ca|x)=[a-z0-9{}]{0,4}", text: String) {
        const SECRET: &str = "Xs3cr3tX";
        let scheme = if tls { "rediss" } else { "redis" };
        for tail in ["h", "h:6379/0", "[::1]", "h/x", ""] {
            let url = format!("{scheme}://{user}:{SECRET}@{tail}{rest}{option}");
            let shown = match RedisConfig::from_url(&url) {
                Ok(config) => format!("{config:?} {}", config.display_name()),
                Err(e) => {
                    prop_assert_eq!(e.kind(), ErrorKind::InvalidInput);
                    prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
                    format!("{e} {e:?}")
                }
            };
            prop_assert!(!shown.contains(SECRET), "{url:?}: {shown}");
        }
        for url in [text.clone(), format!("redis:{text}"), format!("redis://{text}"), format!("redis://h?{text}")] {
            if let Err(e) = RedisConfig::from_url(&url) {
                prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
            }
        }
    }
}
