//! OpenAPI schemas of request bodies.

use serde_json::{Value, json};
use utoipa::openapi::schema::{AdditionalProperties, AnyOfBuilder, Object, Schema, SchemaType, Type};
use utoipa::openapi::{ObjectBuilder, RefOr};

use super::fields::{ACCEPTED, Harmless, Unsupported};

/// The schema of a body: the fields of `parts` without `foreign`, then fields that are accepted with values without effect. No
/// other fields. `null` means absent, as in `request::parse`.
pub(crate) fn schema(
    description: &str,
    parts: impl IntoIterator<Item = RefOr<Schema>>,
    unsupported: &[&[Unsupported]],
    foreign: &[&str],
) -> RefOr<Schema> {
    let mut whole = ObjectBuilder::new()
        .schema_type(Type::Object)
        .description(Some(description))
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)))
        .build();
    for part in parts {
        let RefOr::T(Schema::Object(part)) = part else {
            unreachable!("parts of a body are structs");
        };
        whole.required.extend(part.required);
        whole.properties.extend(part.properties);
    }
    whole
        .properties
        .retain(|name, _| !foreign.contains(&name.as_str()));
    let unsupported = unsupported
        .iter()
        .flat_map(|list| list.iter().map(|(name, harmless)| (*name, harmless)));
    let accepted = ACCEPTED.iter().map(|&name| (name, &Harmless::Always));
    for (name, harmless) in unsupported.chain(accepted) {
        if let Some(schema) = harmless.schema() {
            whole
                .properties
                .entry(name.to_owned())
                .or_insert_with(|| schema.into());
        }
    }
    for (name, schema) in &mut whole.properties {
        if !whole.required.contains(name) {
            *schema = or_null(std::mem::take(schema));
        }
    }
    whole.into()
}

/// Implements `ToSchema` for a body from the structs that its `RequestBody::take_from` reads.
macro_rules! body {
    ($body:ty, $description:literal, $($part:ty),+) => {
        $crate::wire::known::described!($body);

        impl utoipa::PartialSchema for $body {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                use $crate::wire::request::RequestBody;

                let parts = [$(<$part as utoipa::PartialSchema>::schema()),+];
                $crate::wire::schema::schema($description, parts, Self::UNSUPPORTED, Self::FOREIGN)
            }
        }

        impl utoipa::ToSchema for $body {
            fn schemas(all: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::Schema>)>) {
                $(<$part as utoipa::ToSchema>::schemas(all);)+
            }
        }
    };
}
pub(crate) use body;

/// Implements `ToSchema` for a body of one of several kinds, from the struct that all of them have and the one of each.
macro_rules! either {
    ($body:ty, $own:ty, $($description:literal: $input:ty),+) => {
        $crate::wire::known::described!($body);

        impl utoipa::PartialSchema for $body {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                use $crate::wire::request::RequestBody;

                let kinds = utoipa::openapi::OneOfBuilder::new();
                $(let kinds = kinds.item($crate::wire::schema::schema(
                    $description,
                    [<$own as utoipa::PartialSchema>::schema(), <$input as utoipa::PartialSchema>::schema()],
                    Self::UNSUPPORTED,
                    Self::FOREIGN,
                ));)+
                kinds.into()
            }
        }

        impl utoipa::ToSchema for $body {
            fn schemas(all: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::Schema>)>) {
                <$own as utoipa::ToSchema>::schemas(all);
                $(<$input as utoipa::ToSchema>::schemas(all);)+
            }
        }
    };
}
pub(crate) use either;

/// `schema` or `null`.
fn or_null(mut schema: RefOr<Schema>) -> RefOr<Schema> {
    match &mut schema {
        RefOr::T(Schema::Object(object)) => {
            add_null(&mut object.schema_type);
            if let Some(values) = &mut object.enum_values {
                values.push(Value::Null);
            }
        }
        RefOr::T(Schema::Array(array)) => add_null(&mut array.schema_type),
        // Optional fields of enum and struct types already include null.
        RefOr::T(Schema::OneOf(_)) => {}
        _ => return AnyOfBuilder::new().item(null()).item(schema).into(),
    }
    schema
}

fn add_null(schema: &mut SchemaType) {
    match schema {
        SchemaType::Type(kind) => *schema = SchemaType::Array(vec![kind.clone(), Type::Null]),
        SchemaType::Array(kinds) if !kinds.contains(&Type::Null) => kinds.push(Type::Null),
        SchemaType::Array(_) | SchemaType::AnyValue => {}
    }
}

fn null() -> Object {
    Object::with_type(Type::Null)
}

impl Harmless {
    /// Schema of the accepted values, if there are any.
    fn schema(&self) -> Option<Schema> {
        let any = || ObjectBuilder::new().schema_type(SchemaType::AnyValue);
        let one = |value: Value| any().enum_values(Some([value]));
        let builder = match self {
            Self::Never => return None,
            Self::Always => {
                let any = any().description(Some("Accepted for clients that send it; has no effect."));
                return Some(any.build().into());
            }
            Self::False => one(false.into()),
            Self::True => one(true.into()),
            Self::Zero => one(0.into()),
            Self::One => one(1.into()),
            Self::Empty => any().enum_values(Some([json!([]), json!({}), json!("")])),
            Self::Word(words) => any().enum_values(Some(words.iter().map(|&word| Value::from(word)))),
            Self::Older(_) => any().enum_values(Some([json!([]), json!("none"), json!("auto")])),
            Self::Only(word) => {
                let items = one((*word).into());
                return Some(utoipa::openapi::ArrayBuilder::new().items(items).build().into());
            }
        };
        let builder = builder.description(Some("No other value is supported."));
        Some(builder.build().into())
    }
}
