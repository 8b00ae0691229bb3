//! Which fields the objects within a request have, by the schemas of its types, and what to do about others.

use std::collections::HashMap;

use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa::openapi::schema::{AdditionalProperties, ArrayItems, Object, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};

/// What to do about fields that the API does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownFields {
    /// Refuse the request.
    #[default]
    Error,
    /// Ignore them, and tell the client in a response header.
    Warn,
}

/// Most unknown fields that are remembered of one request.
const MAX_UNKNOWN: usize = 16;

/// How alike two names are, of 1, before one is taken for a misspelling of the other.
const ALIKE: f64 = 0.85;

/// Names of so many bytes and more are not compared with others: the time grows with the product of both lengths.
const TOO_LONG: usize = 64;

/// The unknown fields of one request, each name once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unknown(pub(crate) Vec<UnknownField>);

/// A field that the API does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownField {
    /// Where it is, such as `messages[2].colour`.
    pub(crate) path: String,
    /// Its path without indices, such as `messages[].colour`.
    pub(crate) name: String,
    /// The field beside it that was probably meant.
    pub(crate) meant: Option<String>,
}

impl Unknown {
    /// `known`: the fields that could stand there.
    pub(crate) fn add<'a>(&mut self, path: &str, known: impl Iterator<Item = &'a str>) {
        let name = without_indices(path);
        if self.0.len() == MAX_UNKNOWN || self.0.iter().any(|field| field.name == name) {
            return;
        }
        let own = name.rsplit('.').next().unwrap_or_default();
        let meant = known
            .filter(|_| own.len() < TOO_LONG)
            .map(|known| (strsim::jaro_winkler(own, known), known))
            .filter(|&(likeness, _)| likeness > ALIKE)
            .max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(a.1)))
            .map(|(_, known)| known.to_owned());
        self.0.push(UnknownField {
            path: path.to_owned(),
            name,
            meant,
        });
    }

    /// Their paths without indices.
    pub(crate) fn into_names(self) -> impl Iterator<Item = String> {
        self.0.into_iter().map(|field| field.name)
    }
}

/// `a[1].b` as `a[].b`.
fn without_indices(path: &str) -> String {
    let mut parts = path.split('[');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        name.push('[');
        name.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    name
}

/// The fields of one type of body.
#[derive(Debug)]
pub(crate) struct Known {
    fields: Fields,
    named: HashMap<String, Shape>,
}

type Fields = HashMap<String, Shape>;

/// What a value may be.
#[derive(Debug)]
enum Shape {
    /// Anything, such as a JSON schema.
    Any,
    /// Text, a number, a boolean or `null`.
    Scalar,
    List(Box<Shape>),
    Fields(FieldsOf),
    Either(Vec<Shape>),
    /// One of [`Known::named`].
    Named(String),
}

/// What an object may have.
#[derive(Debug, Default)]
struct FieldsOf {
    fields: Fields,
    /// There are no others.
    is_closed: bool,
    /// Fields with few values, such as `type`: an object with another value, or without one that is required, is of another type.
    marks: Vec<Mark>,
}

#[derive(Debug)]
struct Mark {
    field: String,
    values: Vec<String>,
    is_required: bool,
}

/// A body's type, whose fields are known.
pub(crate) trait Described {
    fn known() -> &'static Known;
}

/// Implements [`Described`] by the type's schema, which is read once.
macro_rules! described {
    ($body:ty) => {
        impl $crate::wire::known::Described for $body {
            fn known() -> &'static $crate::wire::known::Known {
                static KNOWN: std::sync::OnceLock<$crate::wire::known::Known> = std::sync::OnceLock::new();
                KNOWN.get_or_init($crate::wire::known::Known::of::<Self>)
            }
        }
    };
}
pub(crate) use described;

impl Known {
    pub(crate) fn of<T: ToSchema>() -> Self {
        let mut named = Vec::new();
        T::schemas(&mut named);
        let schemas = Schemas(
            named
                .iter()
                .map(|(name, schema)| (name.as_str(), schema))
                .collect(),
        );
        let mut fields = Fields::new();
        schemas.add_fields(&T::schema(), &mut fields);
        let shapes = schemas.0.iter();
        Self {
            fields,
            named: shapes
                .map(|(name, schema)| ((*name).to_owned(), schemas.shape(schema)))
                .collect(),
        }
    }

    /// Whether the body itself has this field.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// The fields of the body itself.
    pub(crate) fn field_names(&self) -> impl Iterator<Item = &str> {
        self.fields.keys().map(String::as_str)
    }

    /// Removes the unknown fields of all objects within `body`; those of the body itself stay.
    pub(crate) fn strip(&self, body: &mut Map<String, Value>, unknown: &mut Unknown) {
        for (name, value) in body {
            if let Some(shape) = self.fields.get(name) {
                let mut path = name.clone();
                self.strip_value(shape, value, &mut path, unknown);
            }
        }
    }

    fn strip_value(&self, shape: &Shape, value: &mut Value, path: &mut String, unknown: &mut Unknown) {
        let end = path.len();
        match (shape, value) {
            (Shape::Named(name), value) => {
                if let Some(shape) = self.named.get(name) {
                    self.strip_value(shape, value, path, unknown);
                }
            }
            (Shape::Either(shapes), value) => {
                if let Some(shape) = self.closest(shapes, value) {
                    self.strip_value(shape, value, path, unknown);
                }
            }
            (Shape::List(shape), Value::Array(items)) if !shape.is_leaf() => {
                for (index, item) in items.iter_mut().enumerate() {
                    path.push_str(&format!("[{index}]"));
                    self.strip_value(shape, item, path, unknown);
                    path.truncate(end);
                }
            }
            (Shape::Fields(of), Value::Object(object)) => object.retain(|name, value| {
                path.push('.');
                path.push_str(name);
                let shape = of.fields.get(name);
                match shape {
                    Some(shape) => self.strip_value(shape, value, path, unknown),
                    None if of.is_closed && !value.is_null() => {
                        unknown.add(path, of.fields.keys().map(String::as_str));
                    }
                    None => {}
                }
                path.truncate(end);
                shape.is_some() || !of.is_closed
            }),
            _ => {}
        }
    }

    /// Of the shapes that `value` may have, the one with the fewest unknown fields.
    fn closest<'a>(&self, shapes: &'a [Shape], value: &Value) -> Option<&'a Shape> {
        let mut possible = shapes.iter().filter(|shape| self.may_be(shape, value));
        let first = possible.next()?;
        match possible.next() {
            None => Some(first),
            Some(second) => {
                let possible = [first, second].into_iter().chain(possible);
                possible.min_by_key(|shape| self.count(shape, value))
            }
        }
    }

    fn may_be(&self, shape: &Shape, value: &Value) -> bool {
        match (shape, value) {
            (Shape::Any, _) | (Shape::List(_), Value::Array(_)) => true,
            (Shape::Scalar, value) => !value.is_array() && !value.is_object(),
            (Shape::Fields(of), Value::Object(object)) => {
                of.marks.iter().all(|mark| match object.get(&mark.field) {
                    None | Some(Value::Null) => !mark.is_required,
                    Some(value) => mark.values.iter().any(|word| value == word),
                })
            }
            (Shape::Either(shapes), value) => shapes.iter().any(|shape| self.may_be(shape, value)),
            (Shape::Named(name), value) => self
                .named
                .get(name)
                .is_some_and(|shape| self.may_be(shape, value)),
            _ => false,
        }
    }

    /// Number of unknown fields.
    fn count(&self, shape: &Shape, value: &Value) -> usize {
        match (shape, value) {
            (Shape::Named(name), value) => self.named.get(name).map_or(0, |shape| self.count(shape, value)),
            (Shape::Either(shapes), value) => self
                .closest(shapes, value)
                .map_or(0, |shape| self.count(shape, value)),
            (Shape::List(shape), Value::Array(items)) if !shape.is_leaf() => {
                items.iter().map(|item| self.count(shape, item)).sum()
            }
            (Shape::Fields(of), Value::Object(object)) => object
                .iter()
                .map(|(name, value)| match of.fields.get(name) {
                    Some(shape) => self.count(shape, value),
                    None => usize::from(of.is_closed),
                })
                .sum(),
            _ => 0,
        }
    }
}

impl Shape {
    /// There is no object in it whose fields are known.
    fn is_leaf(&self) -> bool {
        matches!(self, Self::Any | Self::Scalar)
    }
}

/// The schemas to which others refer, by name.
struct Schemas<'a>(HashMap<&'a str, &'a RefOr<Schema>>);

impl Schemas<'_> {
    /// Adds the fields of a body, which may be of several types.
    fn add_fields(&self, schema: &RefOr<Schema>, fields: &mut Fields) {
        match self.resolved(schema) {
            Some(Schema::Object(object)) => fields.extend(self.fields(object)),
            Some(Schema::OneOf(either)) => either.items.iter().for_each(|item| self.add_fields(item, fields)),
            _ => {}
        }
    }

    fn fields(&self, object: &Object) -> Fields {
        let fields = object.properties.iter();
        fields
            .map(|(name, schema)| (name.clone(), self.shape(schema)))
            .collect()
    }

    fn resolved<'s>(&'s self, schema: &'s RefOr<Schema>) -> Option<&'s Schema> {
        match schema {
            RefOr::T(schema) => Some(schema),
            RefOr::Ref(reference) => self.resolved(self.0.get(name(&reference.ref_location))?),
        }
    }

    fn shape(&self, schema: &RefOr<Schema>) -> Shape {
        let schema = match schema {
            RefOr::Ref(reference) => return Shape::Named(name(&reference.ref_location).to_owned()),
            RefOr::T(schema) => schema,
        };
        match schema {
            Schema::Array(array) => match &array.items {
                ArrayItems::RefOrSchema(items) => Shape::List(Box::new(self.shape(items))),
                ArrayItems::False => Shape::Any,
            },
            Schema::Object(object) => self.object(object),
            Schema::OneOf(either) => {
                Shape::Either(either.items.iter().map(|item| self.variant(item)).collect())
            }
            Schema::AnyOf(either) => {
                Shape::Either(either.items.iter().map(|item| self.shape(item)).collect())
            }
            Schema::AllOf(all) => {
                let mut whole = FieldsOf::default();
                for item in &all.items {
                    if let Some(Schema::Object(object)) = self.resolved(item) {
                        whole.add(self.fields_of(object));
                    }
                }
                Shape::Fields(whole)
            }
            _ => Shape::Any,
        }
    }

    fn object(&self, object: &Object) -> Shape {
        let is = |kind: &Type| match &object.schema_type {
            SchemaType::Type(one) => one == kind,
            SchemaType::Array(kinds) => kinds.contains(kind),
            SchemaType::AnyValue => true,
        };
        match is(&Type::Object) {
            true if object.properties.is_empty() => Shape::Any,
            true => Shape::Fields(self.fields_of(object)),
            false => Shape::Scalar,
        }
    }

    fn fields_of(&self, object: &Object) -> FieldsOf {
        let marks = object.properties.iter().filter_map(|(field, schema)| {
            Some(Mark {
                field: field.clone(),
                values: words(schema)?,
                is_required: object.required.contains(field),
            })
        });
        FieldsOf {
            fields: self.fields(object),
            is_closed: matches!(
                object.additional_properties.as_deref(),
                Some(AdditionalProperties::FreeForm(false))
            ),
            marks: marks.collect(),
        }
    }

    /// One of several types. One that is described in place is the variant of an enum: those have no other fields, which utoipa
    /// does not say.
    fn variant(&self, schema: &RefOr<Schema>) -> Shape {
        match self.shape(schema) {
            Shape::Fields(of) if matches!(schema, RefOr::T(Schema::Object(_))) => Shape::Fields(FieldsOf {
                is_closed: true,
                ..of
            }),
            shape => shape,
        }
    }
}

impl FieldsOf {
    /// Has the fields of `other` too.
    fn add(&mut self, other: Self) {
        self.fields.extend(other.fields);
        self.is_closed |= other.is_closed;
        self.marks.extend(other.marks);
    }
}

/// The words that a field may be, where the schema lists them, or a pattern like `^word$`.
fn words(schema: &RefOr<Schema>) -> Option<Vec<String>> {
    let RefOr::T(Schema::Object(object)) = schema else {
        return None;
    };
    if let Some(values) = &object.enum_values {
        return values
            .iter()
            .map(|value| value.as_str().map(str::to_owned))
            .collect();
    }
    let pattern = object.pattern.as_deref()?;
    let word = pattern.strip_prefix('^')?.strip_suffix('$')?;
    let is_plain = word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_plain.then(|| vec![word.to_owned()])
}

/// The name in a reference such as `#/components/schemas/NAME`.
fn name(reference: &str) -> &str {
    reference.rsplit('/').next().unwrap_or(reference)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize, ToSchema)]
    #[expect(dead_code, reason = "only its schema is used")]
    struct Body {
        shape: Option<Kind>,
        list: Option<Vec<Closed>>,
        open: Option<Open>,
        anything: Option<Value>,
    }

    #[derive(Debug, Deserialize, ToSchema)]
    #[serde(tag = "type", rename_all = "lowercase")]
    #[expect(dead_code, reason = "only its schema is used")]
    enum Kind {
        Circle { radius: u32 },
        Group(Group),
    }

    #[derive(Debug, Deserialize, ToSchema)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its schema is used")]
    struct Group {
        #[schema(no_recursion)]
        of: Vec<Kind>,
    }

    #[derive(Debug, Deserialize, ToSchema)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its schema is used")]
    struct Closed {
        a: u32,
    }

    #[derive(Debug, Deserialize, ToSchema)]
    #[expect(dead_code, reason = "only its schema is used")]
    struct Open {
        inner: Option<Closed>,
    }

    fn stripped(body: Value) -> (Value, Unknown) {
        let Value::Object(mut body) = body else {
            panic!("an object")
        };
        let mut unknown = Unknown::default();
        Known::of::<Body>().strip(&mut body, &mut unknown);
        (Value::Object(body), unknown)
    }

    #[test]
    fn unknown_fields_are_found_at_every_depth() {
        let (body, unknown) = stripped(json!({
            "list": [{ "a": 1 }, { "a": 1, "b": 2 }, { "b": 3 }],
            "open": { "b": 1, "inner": { "a": 1, "c": 1 } },
            "shape": { "type": "group", "d": 1, "of": [
                { "type": "circle", "radius": 1, "e": 1 }, { "type": "group", "of": [], "f": 1 }, { "type": "square", "g": 1 },
            ] },
            "anything": { "b": { "c": 1 } },
            "top": 1,
        }));
        let expected = json!({
            "list": [{ "a": 1 }, { "a": 1 }, {}],
            "open": { "b": 1, "inner": { "a": 1 } },
            // What is of no known type is left to the parser.
            "shape": { "type": "group", "of": [
                { "type": "circle", "radius": 1 }, { "type": "group", "of": [] }, { "type": "square", "g": 1 },
            ] },
            "anything": { "b": { "c": 1 } },
            "top": 1,
        });
        assert_eq!(body, expected);
        assert_eq!(unknown.0[0].path, "list[1].b");
        let names: Vec<_> = unknown.into_names().collect();
        let expected = [
            "list[].b",
            "open.inner.c",
            "shape.d",
            "shape.of[].e",
            "shape.of[].f",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn values_of_wrong_types_are_left_alone() {
        for body in [
            json!({ "list": 1 }),
            json!({ "shape": [1], "open": "x" }),
            json!({ "list": [[{ "b": 1 }]] }),
        ] {
            assert_eq!(stripped(body.clone()), (body, Unknown::default()));
        }
    }

    #[test]
    fn only_so_many_fields_are_remembered() {
        let mut unknown = Unknown::default();
        (0..100).for_each(|i| unknown.add(&format!("a[{i}].f{}", i / 2), std::iter::empty()));
        assert_eq!(unknown.0.len(), MAX_UNKNOWN);
        assert_eq!(unknown.0[3].path, "a[6].f3");
        assert!(unknown.into_names().any(|name| name == "a[].f3"));
    }

    #[test]
    fn a_misspelled_field_is_recognised() {
        for (path, known, meant) in [
            ("temprature", vec!["top_p", "temperature"], Some("temperature")),
            (
                "messages[0].contents",
                vec!["role", "content", "name"],
                Some("content"),
            ),
            ("maxTokens", vec!["max_tokens", "top_p"], Some("max_tokens")),
            ("foo", vec!["function_call", "n", "stop"], None),
        ] {
            let mut unknown = Unknown::default();
            unknown.add(path, known.into_iter());
            assert_eq!(unknown.0[0].meant.as_deref(), meant, "{path}");
        }
        let (mut unknown, long) = (Unknown::default(), "x".repeat(30 << 20));
        unknown.add(&long, std::iter::repeat_n(long.as_str(), 100));
        assert_eq!(unknown.0[0].meant, None);
    }
}
