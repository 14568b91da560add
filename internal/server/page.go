package server

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// PageInput are the parameters of a list that has pages. A page continues after
// the key of the last item of the previous one, so that it costs the same wherever
// it begins, and misses and repeats nothing that existed all the time.
type PageInput struct {
	Limit int `query:"limit" minimum:"1" maximum:"10000" default:"1000" doc:"Maximum length of the page"`
	CursorInput
}

// CursorInput is the parameter with which a list continues.
type CursorInput struct {
	Cursor string `query:"cursor" maxLength:"1024" doc:"next of the previous page, with the same other parameters"`
}

// cursor is the position after an item of a list. Clients do not read it.
type cursor struct {
	List string   `json:"l"` // a cursor is valid for one list only
	Key  []string `json:"k"` // of the item: the columns by which the list is sorted
}

func cursorOf(list string, key ...string) string {
	b, _ := json.Marshal(cursor{list, key}) // strings cannot fail
	return base64.RawURLEncoding.EncodeToString(b)
}

// after returns the key in the cursor, as n strings; nil for the first page.
func (in CursorInput) after(list string, n int) ([]string, error) {
	if in.Cursor == "" {
		return nil, nil
	}
	var c cursor
	b, err := base64.RawURLEncoding.DecodeString(in.Cursor)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil || c.List != list || len(c.Key) != n {
		return nil, badCursor()
	}
	return c.Key, nil
}

// afterID is after for a list that is sorted by a number; 0 is the first page.
func (in CursorInput) afterID(list string) (int64, error) {
	key, err := in.after(list, 1)
	if key == nil || err != nil {
		return 0, err
	}
	id, err := strconv.ParseInt(key[0], 10, 64)
	if err != nil || id < 0 {
		return 0, badCursor()
	}
	return id, nil
}

func badCursor() error {
	return agentlab.Errorf(agentlab.CodeInvalid, "invalid cursor").WithField("cursor").
		WithHint("use the field next of the previous page of the same list")
}

// pageOf returns a page of at most limit items from up to limit+1; key returns the
// columns by which the list is sorted.
func pageOf[A, B any](list string, in []A, limit int, convert func(A) B, key func(A) []string) api.List[B] {
	next := ""
	if len(in) > limit {
		in = in[:limit]
		next = cursorOf(list, key(in[limit-1])...)
	}
	return api.List[B]{Items: mapSlice(in, convert), Next: next}
}

// pager is the input of a list with pages.
type pager interface{ page() PageInput }

func (in PageInput) page() PageInput { return in }

// paged binds a handler that returns a whole list, which a limit of the
// configuration bounds, and answers with a page of it. The list is sorted by key.
func paged[I pager, T any](list string, h func(context.Context, *I) ([]T, error), key func(T) []string) binder {
	return call(func(ctx context.Context, in *I) (api.List[T], error) {
		items, err := h(ctx, in)
		if err != nil {
			return api.List[T]{}, err
		}
		return pageFrom(list, items, (*in).page(), key)
	})
}

// pageFrom returns a page of items, which are sorted by key.
func pageFrom[T any](list string, items []T, in PageInput, key func(T) []string) (api.List[T], error) {
	after, err := in.after(list, len(key(*new(T))))
	if err != nil {
		return api.List[T]{}, err
	}
	if after != nil {
		i, found := slices.BinarySearchFunc(items, after, func(v T, after []string) int { return slices.Compare(key(v), after) })
		if found {
			i++
		}
		items = items[i:]
	}
	return pageOf(list, items, in.Limit, func(v T) T { return v }, key), nil
}

// timeKey returns a time as a part of a key: the order of the text is that of the
// times.
func timeKey(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000000000Z") }

func parseTimeKey(s string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return t, badCursor()
	}
	return t, nil
}
