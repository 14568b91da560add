package secret

import "context"

// Outline returns a bundle without resolving its references: the plain values,
// and the keys of the references, sorted. Codes: those of Deliver for a bundle
// that is missing or cannot be read.
func (v *Vault) Outline(ctx context.Context, name string) (plain Bundle, references []string, err error) {
	b, err := v.load(ctx, name)
	if err != nil {
		return Bundle{}, nil, err
	}
	for _, e := range b.entries() {
		if _, ok := parseReference(e.value); ok {
			references = append(references, e.key)
			continue
		}
		plain.put(e.key, literal(e.value))
	}
	return plain, references, nil
}
