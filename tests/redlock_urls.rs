//! Any URL of a quorum is read, or refused in one line that does not tell the password. `PROPTEST_CASES` says how many.

use lockkit::{ErrorKind, redlock::RedisNodes};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_url_is_read_or_refused_in_one_line(
        user in "[a-z]{0,2}", hosts in "[a-z,:0-9@/\\[\\]{}%]{0,12}", rest: String, text: String,
        options in "[?&](durable|max_ttl|node_timeout|prefix|timeout|x)=[a-z0-9{}]{0,4}",
    ) {
        const SECRET: &str = "Xs3cr3tX";
        for tail in ["a,b,c", "a", ""] {
            let url = format!("redlock://{user}:{SECRET}@{tail}{hosts}{rest}{options}");
            let shown = match RedisNodes::from_url(&url) {
                Ok(nodes) => format!("{nodes:?}"),
                Err(e) => {
                    prop_assert_eq!(e.kind(), ErrorKind::InvalidInput);
                    prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
                    format!("{e} {e:?}")
                }
            };
            prop_assert!(!shown.contains(SECRET), "{url:?}: {shown}");
        }
        for url in [text.clone(), format!("redlock://{text}"), format!("redlock://a,b,c?{text}")] {
            if let Err(e) = RedisNodes::from_url(&url) {
                prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
            }
        }
    }
}
